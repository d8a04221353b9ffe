"""The paths of a database's files in the relay's data folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import google_crc32c

from databus.common.errors import FormatError, StoreError
from databus.common.storage.durable_files import replace_file


@dataclass(frozen=True, slots=True)
class DatabaseFolder:
    """The folder ``<data_dir>/<database>``; the ring's own files lie in it beside these."""

    path: Path

    @staticmethod
    def of(data_dir: Path | str, database: str) -> DatabaseFolder:
        """The folder of a database; it need not exist."""
        return DatabaseFolder(Path(data_dir) / database)

    @property
    def registry(self) -> Path:
        """Every schema version, one JSON line each; only the fetcher appends."""
        return self.path / "schemas.jsonl"

    @property
    def status(self) -> Path:
        """The fetcher's state, replaced atomically at most twice a second."""
        return self.path / "status.json"

    @property
    def dumps(self) -> Path:
        """The dumps with their progress, replaced atomically."""
        return self.path / "dumps.json"

    @property
    def tables(self) -> Path:
        """The tables that are not followed, as of the ring's last sync."""
        return self.path / "tables.json"

    @property
    def open_window(self) -> Path:
        """The position before a window that readers have seen a part of; see ``Intake``."""
        return self.path / "window.json"

    @property
    def resume_state(self) -> Path:
        """The source's resume state; see ``ResumableSource``."""
        return self.path / "source.json"

    @property
    def leader(self) -> Path:
        """In a cluster: the newest term of a leader of which the ring may have frames."""
        return self.path / "leader.json"

    @property
    def socket(self) -> Path:
        """The socket of the running fetcher; connect through ``SocketName``."""
        return self.path / "fetcher.sock"


_SEAL = b"crc32c="


class SocketName:
    """A short name of a unix socket, however deep its folder is.

    The kernel takes at most 107 bytes; the name leads there through an open descriptor of
    the folder.

    Invariants:
        I1. ``path`` is valid until ``close`` and in this process only.

    Owner: the process that listens or connects; closed after the last connection was made.
    Raises: StoreError if the folder is missing.
    """

    def __init__(self, socket: Path) -> None:
        try:
            self._fd = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"{socket.parent}: {error.strerror}; has the fetcher run?") from error
        self.path = f"/proc/self/fd/{self._fd}/{socket.name}"

    def close(self) -> None:
        """Close the folder."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_document(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a document of one line at ``path`` atomically, with its CRC in a line before it."""
    replace_file(
        path, b"%b%08x\n%b" % (_SEAL, google_crc32c.value(content), content), durable=durable
    )


def read_document(path: Path) -> bytes | None:
    """The content that ``write_document`` wrote, also without a CRC (earlier releases); or None.

    Raises:
        FormatError: it was cut or damaged.
        StoreError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    head, newline, content = data.partition(b"\n")
    if not newline and head[: len(_SEAL)] != _SEAL[: len(head)]:
        return data
    if not newline or head != b"%b%08x" % (_SEAL, google_crc32c.value(content)):
        raise FormatError(
            f"{path} is damaged: its {len(data)} bytes do not have the CRC of its first line, "
            f"{head[:40]!r}; restore it from a copy, or move it away"
        )
    return content


def write_leader(folder: DatabaseFolder, epoch: int, relay: str) -> None:
    """Write the newest term to disk."""
    write_document(folder.leader, json.dumps({"epoch": epoch, "relay": relay}).encode())


def read_leader(folder: DatabaseFolder) -> tuple[int, str]:
    """The newest term whose frames the ring may have: its epoch, 0 without a cluster, and relay.

    Raises:
        FormatError: the file is damaged.
    """
    content = read_document(folder.leader)
    if content is None:
        return 0, ""
    try:
        document = json.loads(content)
        return int(document["epoch"]), str(document["relay"])
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"it has no epoch: {error!r}; move it away") from error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to a FormatError about its content."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error.message}") from error
