"""The registry: every schema version of a database, on disk before the first frame uses it.

A file of JSON lines, ``{"fingerprint": "<16 hex>", "schema": {...}}``, that only grows.  The
fetcher appends; HTTP workers read it and read on when it has grown.  The last line of a source is
its current version: a table that returns to an earlier version gets that version's line again.
A line with ``"ahead":true`` is a version of the catalogue that the stream has not reached.

Its length at the last sync is stored beside it, because a file of lines does not show that
its last ones are missing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from databus.common.errors import FormatError, StoreError
from databus.common.schema.source_schema import SchemaSet, SourceSchema
from databus.relay.ring.data_folder import read_document, write_document
from databus.relay.ring.returning_columns import ReturningColumns
from databus.relay.ring.ring_file import sync_directory

_AHEAD_END = b',"ahead":true}\n'


def registry_line(schema: SourceSchema, *, is_ahead: bool = False) -> bytes:
    """The line of a version; ``is_ahead``: the stream has not reached it."""
    document: dict[str, Any] = {
        "fingerprint": f"{schema.fingerprint:016x}",
        "schema": schema.to_json(),
        **({"ahead": True} if is_ahead else {}),
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def read_line(line: bytes, origin: str) -> SourceSchema:
    """The version in a line.

    Raises:
        FormatError: it is not such a line, or its fingerprint differs.
    """
    try:
        document = json.loads(line)
        schema = SourceSchema.from_json(document["schema"])
        stated = document["fingerprint"]
        if unknown := document.keys() - {"schema", "fingerprint", "ahead"}:
            raise FormatError(f"it has the keys {sorted(unknown)} besides those of a version")
    except FormatError as error:
        raise FormatError(f"{origin}: {error.message}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{origin}: not a line of a registry: {error!r}") from error
    if stated != f"{schema.fingerprint:016x}":
        raise FormatError(
            f"{origin}: the fingerprint is {stated!r}, the schema's is {schema.fingerprint:016x}"
        )
    return schema


def end_path(path: Path) -> Path:
    """The path of a registry's length."""
    return path.with_suffix(".end")


def _synced_bytes(path: Path) -> int:
    """The length of a registry at its last sync; 0 in earlier releases.

    Raises:
        FormatError: the record is damaged.
    """
    content = read_document(end_path(path))
    try:
        return 0 if content is None else int(json.loads(content)["bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{end_path(path)} is damaged: {error!r}; move it away") from error


class RegistryReader:
    """The versions in a registry's file, read on as it grows.

    Invariants:
        I1. ``schemas`` only grows, in the order of the file.
        I2. A last line without its end is not there yet, and neither is a line with a zero byte:
            that is what a power loss leaves where a sector was not written, before the file
            had been synced, and so before any process relied on the line or those after it.
        I3. No line is missing of what was synced before the first ``refresh``.

    Owner: one task; another process may append to the file.
    Raises: FormatError from ``refresh`` if the file is damaged; earlier lines stay valid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.schemas = SchemaSet()
        self.shapes = ReturningColumns()
        self.read_bytes = 0
        self._line_count = 0
        self._is_begun = False

    def refresh(self) -> bool:
        """Read the appended lines; True if there was something new."""
        if self._is_begun:
            return self._read_on()
        synced_bytes = _synced_bytes(self.path)
        found = self._read_on()
        if self.read_bytes < synced_bytes:
            raise FormatError(
                f"{self.path} was cut or damaged: its lines end at offset {self.read_bytes}, and "
                f"{synced_bytes} bytes of them were on disk; restore the file of a backup, or "
                f"remove the database's folder"
            )
        self._is_begun = True
        return found

    def _read_on(self) -> bool:
        try:
            size = self.path.stat().st_size
            if size < self.read_bytes:
                raise FormatError(
                    f"{self.path} was cut to {size} bytes while it was read; it had "
                    f"{self.read_bytes}"
                )
            if size == self.read_bytes:
                return False
            with self.path.open("rb") as file:
                file.seek(self.read_bytes)
                grown = file.read()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror}") from error
        before = self.read_bytes
        synced = grown.partition(b"\0")[0]
        for line in synced[: synced.rfind(b"\n") + 1].splitlines(keepends=True):
            origin = f"{self.path} line {self._line_count + 1}, offset {self.read_bytes}"
            schema = read_line(line, origin)
            self.schemas.announce(schema)
            if not line.endswith(_AHEAD_END):
                self.shapes.follow(schema)
            self.read_bytes += len(line)
            self._line_count += 1
        return self.read_bytes > before


def _require_unsynced(path: Path, start: int) -> None:
    """Check that nothing from ``start`` on is a version: a crash left the bytes there.

    Raises:
        StoreError: there is one, so the bytes before it were on disk and are damaged.
    """
    rest = path.read_bytes()[start:] if path.exists() else b""
    for line in rest.split(b"\n")[:-1]:
        with contextlib.suppress(FormatError):
            read_line(line, "")
            raise StoreError(
                f"{path} is damaged at offset {start}: zero bytes before whole lines; restore "
                "the file of a backup, or remove the database's folder"
            )


class Registry:
    """The fetcher's side of the registry.

    Invariants:
        I1. A version in ``schemas`` is on disk.
        I2. The file holds whole lines only; what a crash left after them is cut off at start,
            what a full disk left is cut off before the next line.
        I3. Before the line of a version is on disk with which the stream has a column of an earlier
            version again, ``on_return`` has been called.

    Owner: the fetcher's task.
    Durability: when ``add`` returns, the versions are on disk.
    Raises: FormatError if the file is damaged, StoreError if the disk refuses.
    """

    def __init__(
        self, path: Path, on_return: Callable[[str, Sequence[str]], None] = lambda *_: None
    ) -> None:
        """``on_return``: a source has these columns again."""
        reader = RegistryReader(path)
        reader.refresh()
        _require_unsynced(path, reader.read_bytes)
        self.path = path
        self.schemas = reader.schemas
        self.on_return = on_return
        self._shapes = reader.shapes
        self._synced_bytes = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Lines that an earlier process failed to sync look as if they were on disk.
        self._unsynced = os.pread(self._fd, reader.read_bytes, 0)
        self._write(b"")
        sync_directory(path.parent)

    def add(self, schemas: Iterable[SourceSchema]) -> list[SourceSchema]:
        """Append the versions that are not there yet and sync; returns them.

        The stream may not have reached them.
        """
        wanted = {schema.fingerprint: schema for schema in schemas}
        new = [schema for fp, schema in wanted.items() if fp not in self.schemas]
        self._append(new, is_ahead=True)
        return new

    def follow(self, schemas: Iterable[SourceSchema]) -> None:
        """``announce`` for the stream, which has reached these versions in this order."""
        wanted = list(schemas)
        unknown = {s.fingerprint for s in wanted if not self._shapes.has_followed(s)}
        for schema in wanted:
            if names := self._shapes.returning(schema):
                self.on_return(schema.source, names)
            self._shapes.follow(schema)
        self._append(self._changes(wanted, unknown))

    def announce(self, schemas: Iterable[SourceSchema]) -> None:
        """Make each of these versions the current one of its source, in this order, and sync."""
        self._append(self._changes(schemas))

    def _changes(
        self, schemas: Iterable[SourceSchema], unknown: Container[int] = ()
    ) -> list[SourceSchema]:
        """The versions that are not the current ones in this order, or ``unknown``."""
        current: dict[str, int] = {}
        new = []
        for schema in schemas:
            latest = self.schemas.latest(schema.source)
            before = current.get(schema.source, latest.fingerprint if latest else None)
            if before != schema.fingerprint or schema.fingerprint in unknown:
                new.append(schema)
            current[schema.source] = schema.fingerprint
        return new

    def _append(self, new: Sequence[SourceSchema], *, is_ahead: bool = False) -> None:
        if not new:
            return
        self._write(b"".join(registry_line(schema, is_ahead=is_ahead) for schema in new))
        for schema in new:
            self.schemas.announce(schema)

    def _write(self, lines: bytes) -> None:
        """Write ``lines`` to disk after all synced lines, and those that were not synced again.

        Whole lines stay, because a reader may have them already: a second copy does no harm.
        """
        wanted = self._unsynced + lines
        try:
            os.ftruncate(self._fd, self._synced_bytes + len(self._unsynced))
            written = os.pwrite(self._fd, wanted, self._synced_bytes)
            whole = max(len(self._unsynced), wanted.rfind(b"\n", 0, written) + 1)
            self._unsynced = wanted[:whole]
            if written != len(wanted):
                raise StoreError(f"{self.path}: only {written} of {len(wanted)} bytes written")
            os.fsync(self._fd)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}") from error
        self._synced_bytes += len(wanted)
        self._unsynced = b""
        if wanted:
            end = json.dumps({"bytes": self._synced_bytes}).encode()
            write_document(end_path(self.path), end)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
