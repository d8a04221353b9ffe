"""Dumps as records: the request, how far each has come, and their file.

dump_runner.py runs them.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from databus.common.checkpoint import Position, decode_position
from databus.common.errors import BadCheckpoint, BadRequest, FormatError, NotFound
from databus.common.filters.predicate import parse_where
from databus.relay.ring.data_folder import read_document, write_document

DEFAULT_CHUNK_ROWS = 2000
MAX_CHUNK_ROWS = 1_000_000
DEFAULT_CHUNK_MS = 250
MAX_CHUNK_MS = 60_000
MAX_PARALLEL = 16
MAX_DELAY_MS = 3_600_000
DEFAULT_SHARE = 25
MAX_KEYS = 100_000
KEPT_FINISHED = 100
KEPT_MISSING = 1000


class DumpState(enum.StrEnum):
    """Where a dump is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


ACTIVE = (DumpState.RUNNING, DumpState.QUEUED)
FINISHED = (DumpState.COMPLETED, DumpState.FAILED, DumpState.CANCELLED)

# (state, requested by PATCH) -> new state; other pairs are refused.
TRANSITIONS: dict[tuple[DumpState, DumpState], DumpState] = {
    (DumpState.QUEUED, DumpState.PAUSED): DumpState.PAUSED,
    (DumpState.RUNNING, DumpState.PAUSED): DumpState.PAUSED,
    (DumpState.PAUSED, DumpState.PAUSED): DumpState.PAUSED,
    (DumpState.QUEUED, DumpState.RUNNING): DumpState.QUEUED,
    (DumpState.RUNNING, DumpState.RUNNING): DumpState.RUNNING,
    (DumpState.PAUSED, DumpState.RUNNING): DumpState.QUEUED,
    (DumpState.FAILED, DumpState.RUNNING): DumpState.QUEUED,
}


@dataclasses.dataclass(slots=True)
class TableProgress:
    """How far one table has come: everything up to ``last_key`` is in the ring and durable."""

    source: str
    upto: list[Any] | None = None
    last_key: list[Any] | None = None
    done: bool = False
    rows: int = 0
    dropped: int = 0
    chunks: int = 0
    estimated_rows: int | None = None
    row_bytes: int | None = None
    is_scanned: bool = False


# Fields that records had from the beginning; the others have their defaults in old files.
_ALWAYS = frozenset({"id", "sources", "state", "tables"})


@dataclasses.dataclass(slots=True)
class Dump:
    """One dump.  ``tables`` is None until it has begun; ``missing`` are requested keys without
    a row (the first thousand).

    ``chunk_ms`` is how long a chunk's read should take: ``chunk_rows`` follows it, unless it
    is 0.  ``share`` is the percentage of the time in which chunks are read while the stream
    brings changes; 100 never pauses.  ``parallel`` is the number of chunks read at once.
    With a ``watermark_table`` each chunk is between two rows written there.  With
    ``delete_missing`` the requested keys without a row go out as deletions.

    ``after`` has the key, by source, after which its rows are read.

    ``reader`` is the position of a reader that must get every row: no more rows go out while it
    has too much of the ring before it.  None: there is no such reader.  The record on disk may
    have an older position of a moving reader; the dump then waits there for the next report.
    """

    id: str
    sources: list[str]
    where: str | None = None
    keys: list[list[Any]] | None = None
    chunk_rows: int = DEFAULT_CHUNK_ROWS
    delay_ms: int = 0
    chunk_ms: int = 0
    share: int = DEFAULT_SHARE
    parallel: int = 1
    watermark_table: str | None = None
    delete_missing: bool = False
    after: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    reader: Position | None = None
    state: DumpState = DumpState.QUEUED
    tables: list[TableProgress] | None = None
    missing: list[list[Any]] = dataclasses.field(default_factory=list)
    reread_chunks: int = 0
    error: dict[str, Any] | None = None
    end: Position | None = None

    @property
    def is_running(self) -> bool:
        """Whether the dump is not paused, cancelled or finished."""
        return self.state == DumpState.RUNNING

    def failure(self, source: str) -> str:
        """Why it has not read this table, for people."""
        error = self.error or {}
        why = error.get("unread", {}).get(source) or error.get("detail") or error.get("title")
        return str(why or f"dump {self.id} was {self.state}")

    def to_json(self) -> dict[str, Any]:
        """The record as it is served and stored."""
        document = _fields(self)
        tables = self.tables or []
        if self.tables is not None:
            document["tables"] = [_fields(table) for table in tables]
        document["rows"] = sum(table.rows for table in tables)
        document["chunks"] = sum(table.chunks for table in tables)
        for name, position in (("end", self.end), ("reader", self.reader)):
            document[name] = None if position is None else position.to_json()
        return document

    @staticmethod
    def from_json(document: dict[str, Any]) -> Dump:
        """What ``to_json`` wrote.

        Raises:
            FormatError: it is something else.
        """
        try:
            values = {
                field.name: document[field.name]
                for field in dataclasses.fields(Dump)
                if field.name in document or field.name in _ALWAYS
            }
            values["state"] = DumpState(values["state"])
            if values["tables"] is not None:
                values["tables"] = [TableProgress(**table) for table in values["tables"]]
            for name in ("end", "reader"):
                values[name] = _position(values.get(name))
            return Dump(**values)
        except (BadCheckpoint, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"not a dump: {error!r} in {str(document)[:200]}") from error


def _fields(record: Dump | TableProgress) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def new_dump(request: Any) -> Dump:
    """The dump that a request describes.

    Raises:
        BadRequest: a key is unknown or its value not of its form.
        BadFilter: ``where`` is no predicate.
    """
    choice = ("sources", "where", "keys", "delete_missing", "after")
    document = _object(request, (*choice, "watermark_table", "reader", *_PACE))
    sources = document.get("sources")
    if not isinstance(sources, list) or not sources or not all(isinstance(s, str) for s in sources):
        raise BadRequest(f"sources is {sources!r}; give a list of globs such as ['shop.*']")
    where = document.get("where")
    if where is not None and (not isinstance(where, str) or not where.strip()):
        raise BadRequest(f"where is {where!r}; give a condition over columns, or leave it out")
    if where is not None:
        parse_where(where)
    keys = document.get("keys")
    if keys is not None:
        if not isinstance(keys, list) or not 1 <= len(keys) <= MAX_KEYS:
            raise BadRequest(f"keys must be a list of 1 to {MAX_KEYS} keys")
        keys = [key if isinstance(key, list) else [key] for key in keys]
    delete_missing = document.get("delete_missing", False)
    if not isinstance(delete_missing, bool) or (delete_missing and keys is None):
        raise BadRequest("delete_missing is true or false, and only for a list of keys")
    after = document.get("after", {})
    is_after = isinstance(after, dict) and all(isinstance(k, list) and k for k in after.values())
    if not is_after or (after and keys is not None):
        raise BadRequest("after has a key, as a list, for each of some sources; not with keys")
    table = document.get("watermark_table")
    if table is not None and (not isinstance(table, str) or not table):
        raise BadRequest(f"watermark_table is {table!r}; give the name of a captured table")
    dump = Dump(
        id=secrets.token_hex(4),
        sources=sources,
        where=where,
        keys=keys,
        watermark_table=table,
        delete_missing=delete_missing,
        after=after,
        reader=_reader(document, None),
    )
    # A request with a size fixes the size; one without gets the time.
    dump.chunk_ms = 0 if "chunk_rows" in document else DEFAULT_CHUNK_MS
    _set_pace(dump, document)
    return dump


def change_dump(dump: Dump, request: Any) -> None:
    """Apply a PATCH: ``state`` paused or running, ``reader``, and any number of the pace.

    Raises:
        BadRequest: a key is unknown, or the dump's state does not allow it.
    """
    document = _object(request, ("state", "reader", *_PACE))
    changed = dataclasses.replace(dump, reader=_reader(document, dump.reader))
    _set_pace(changed, document)
    state = dump.state
    if "state" in document:
        if document["state"] not in (DumpState.PAUSED, DumpState.RUNNING):
            raise BadRequest(f"state is {document['state']!r}; it can be set to paused or running")
        wanted = TRANSITIONS.get((dump.state, DumpState(document["state"])))
        if wanted is None:
            raise BadRequest(
                f"dump {dump.id} is {dump.state} and cannot be set to {document['state']}"
            )
        state = wanted
    if state != DumpState.FAILED:
        dump.error = None
    dump.state = state
    if "chunk_rows" in document and "chunk_ms" not in document:
        changed.chunk_ms = 0  # As in ``new_dump``: a size was given, and not a time.
    for name in ("reader", *_PACE):
        setattr(dump, name, getattr(changed, name))


# How fast a dump goes: what can be changed while it runs, with minimum and maximum.
_PACE = {
    "chunk_rows": (1, MAX_CHUNK_ROWS),
    "chunk_ms": (0, MAX_CHUNK_MS),
    "delay_ms": (0, MAX_DELAY_MS),
    "share": (1, 100),
    "parallel": (1, MAX_PARALLEL),
}


def _set_pace(dump: Dump, document: dict[str, Any]) -> None:
    for name, (least, most) in _PACE.items():
        setattr(dump, name, _number(document, name, least, most, getattr(dump, name)))


def _reader(document: dict[str, Any], default: Position | None) -> Position | None:
    try:
        return _position(document["reader"]) if "reader" in document else default
    except BadCheckpoint as error:
        raise BadRequest(f"reader: {error.message}") from None


def _position(document: Any) -> Position | None:
    return None if document is None else decode_position(document)


def _object(request: Any, allowed: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(request, dict):
        raise BadRequest(f"the body is a {type(request).__name__}, not an object")
    unknown = sorted(set(request) - set(allowed))
    if unknown:
        raise BadRequest(f"unknown key {unknown[0]!r}; known are {', '.join(allowed)}")
    return request


def _number(document: dict[str, Any], name: str, least: int, most: int, default: int) -> int:
    value = document.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"{name} is {value!r}, not a number from {least} to {most}")
    return value


class DumpBook:
    """All dumps of a database, in the order of their requests.

    Invariants:
        I1. Progress in the file is never ahead of the ring's disk: it is recorded after the
            ring was synced.
        I2. Finished dumps beyond the newest ``KEPT_FINISHED`` are removed.

    Owner: the fetcher's loop; only ``write`` may be called in another thread.
    Durability: when ``save`` or ``write`` returns, the records are on disk.
    Raises: StoreError, FormatError from the constructor if the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dumps: dict[str, Dump] = {}
        content = read_document(path)
        if content is None:
            return
        try:
            documents = json.loads(content)["dumps"]
            dumps = [Dump.from_json(document) for document in documents]
        except FormatError as error:
            raise FormatError(f"{path}: {error.message}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path} is damaged: {error!r}; move it away") from error
        self._dumps = {dump.id: dump for dump in dumps}

    def __iter__(self) -> Iterator[Dump]:
        return iter(list(self._dumps.values()))

    def get(self, dump_id: str) -> Dump:
        """The dump of this id.

        Raises:
            NotFound: there is none.
        """
        try:
            return self._dumps[dump_id]
        except KeyError:
            raise NotFound(f"there is no dump {dump_id!r} among {len(self._dumps)}") from None

    def add(self, dump: Dump) -> None:
        """Put a dump at the end of the queue."""
        self._dumps[dump.id] = dump
        finished = [old.id for old in self if old.state in FINISHED]
        for old_id in finished[: max(0, len(finished) - KEPT_FINISHED)]:
            del self._dumps[old_id]

    def next_active(self) -> Dump | None:
        """The dump to work on: one that has begun before one that has not."""
        for state in ACTIVE:
            for dump in self:
                if dump.state == state:
                    return dump
        return None

    def content(self) -> bytes:
        """The file's content now."""
        return json.dumps({"v": 1, "dumps": [dump.to_json() for dump in self]}).encode()

    def save(self) -> None:
        """Write the records to disk."""
        self.write(self.content())

    def write(self, content: bytes) -> None:
        """Write a result of ``content`` to disk."""
        write_document(self.path, content)
