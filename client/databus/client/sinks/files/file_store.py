"""Where files lie: a local folder, or S3, Google Cloud Storage and Azure through pyarrow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pyarrow import fs

from databus.common.errors import ConfigError
from databus.common.storage.durable_files import sync_path


class FileStore:
    """Objects under one URL, by their path.

    Durability: when ``put`` returns, the object is there whole: a local file is synced and renamed.
    Raises: OSError; ConfigError for a URL that pyarrow does not read.
    """

    def __init__(self, url: str) -> None:
        try:
            system, self._root = fs.FileSystem.from_uri(
                url if "://" in url else Path(url).absolute().as_uri()
            )
        except (ValueError, OSError) as error:
            raise ConfigError(f"[sink.files] url: {url!r} cannot be used: {error}") from error
        self._system: Any = system
        self._is_local = isinstance(system, fs.LocalFileSystem)

    def put(self, path: str, data: bytes) -> None:
        """Write an object; one of this path is replaced."""
        if self._is_local:
            _write_synced(Path(self._root) / path, data)
            return
        with self._system.open_output_stream(f"{self._root}/{path}") as stream:
            stream.write(data)

    def get(self, path: str) -> bytes | None:
        """An object; None if there is none."""
        try:
            with self._system.open_input_stream(f"{self._root}/{path}") as stream:
                data: bytes = stream.read()
                return data
        except FileNotFoundError:
            return None

    def delete(self, path: str) -> None:
        """Delete an object, if it is there, and what an unfinished ``put`` of it left."""
        if self._is_local:
            _unfinished(Path(self._root) / path).unlink(missing_ok=True)
        try:
            self._system.delete_file(f"{self._root}/{path}")
        except FileNotFoundError:
            return


def _unfinished(path: Path) -> Path:
    """Readers of folders pass over names that begin with a dot."""
    return path.with_name(f".{path.name}.new")


def _write_synced(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _unfinished(path)
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_path(path.parent)
