"""Events and windows as an application sees them: names over frames, decoded on access.

An ``Event`` is two references and a number; its row is decoded when the application reads it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from databus.client.application.frame_blocks import Block
from databus.client.application.json_documents import Convert, converters
from databus.client.application.row_columns import RowColumns
from databus.client.application.row_models import row_as
from databus.common.checkpoint import Position
from databus.common.errors import FormatError, UnknownSchema
from databus.common.frame.frame_format import OP_LETTERS, Flag, FrameView, Op
from databus.common.schema.source_schema import SchemaSet, SourceSchema

T = TypeVar("T")
Mode = Literal["online", "bootstrap"]
_LEAST_AHEAD = 8
_MOST_AHEAD = 512
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_UNREAD: Any = object()


class Decoding:
    """How rows become values: all schema versions, and the versions that values come in.

    Invariants:
        I1. A reader schema that the application chose is always used.  Otherwise values of a
            bootstrap come in the current version of their source; values of a relay in the
            current one if it has all columns of the version that they were written with.  In all
            other cases they come as written.

    Owner: the client; one for all events.
    """

    def __init__(
        self,
        database: str,
        schemas: SchemaSet,
        chosen: Mapping[str, SourceSchema] | None = None,
        *,
        objects: bool = True,
    ) -> None:
        self.database = database
        self.schemas = schemas
        self._chosen = dict(chosen or {})
        self._objects = objects
        self._columns: dict[tuple[int, bool], RowColumns] = {}
        # By fingerprint, the revision of the schemas at which the version was its source's reader.
        self._as_written: dict[int, int] = {}
        self._ahead_rows = 1
        self._ahead_count = self._taken_count = 0
        self._converters: dict[int, tuple[tuple[str, Convert], ...]] = {}

    def reader_of(self, source: str) -> SourceSchema:
        """The version in which values of a source come.

        Raises:
            UnknownSchema: no version of it is known.
        """
        reader = self._chosen.get(source) or self.schemas.latest(source)
        if reader is None:
            raise UnknownSchema(f"no schema of {source} is known in database {self.database}")
        return reader

    def value(self, block: Block, index: int, mode: Mode) -> dict[str, Any] | None:
        """The row after the change by column name, without the columns that are absent.

        A caller that asks for one row after the other gets rows that were decoded together.
        """
        row = block.values.pop(index, None)
        if row is not None:
            self._taken_count += 1
        else:
            row = self._decode_ahead(block, index)
        fingerprint = block.schema_fps[index]
        if row is None:
            view = block.frame(index)
            after = view.after
            if after is None:
                return None
            writer = self.schemas.by_fingerprint(fingerprint)
            row = self.row(writer, after, mode)
            if view.absent_len:
                for name in writer.absent_names(view.absent):
                    row.pop(name, None)
        elif self._as_written.get(fingerprint) != self.schemas.revision:
            row = self._resolved(self.schemas.by_fingerprint(fingerprint), row, mode)
        return row

    def row(self, writer: SourceSchema, data: memoryview, mode: Mode) -> dict[str, Any]:
        """A row's values by column name."""
        row = writer.decode_row(data)
        self._convert(writer, row)
        return self._resolved(writer, row, mode)

    def _decode_ahead(self, block: Block, index: int) -> dict[str, Any] | None:
        """Decode a row together with those after it; None if it has to be decoded alone.

        The number grows while the application reads most of the rows that were decoded ahead.
        """
        is_used = 2 * self._taken_count >= self._ahead_count
        self._ahead_rows = min(4 * self._ahead_rows, _MOST_AHEAD) if is_used else 1
        self._taken_count = self._ahead_count = 0
        if min(self._ahead_rows, block.count - index) < _LEAST_AHEAD:
            return None
        indices, starts, stops = block.whole_rows(index, self._ahead_rows)
        if len(indices) < _LEAST_AHEAD:
            return None
        writer = self.schemas.by_fingerprint(block.schema_fps[index])
        try:
            rows = self.row_columns(writer).rows(block.data, starts, stops)
        except FormatError:
            # The row itself may be whole: only access to the damaged one raises the error.
            self._ahead_rows = 1
            return None
        for row in rows:
            self._convert(writer, row)
        block.values.update(zip(indices.tolist(), rows, strict=True))
        self._ahead_count = len(rows) - 1
        return block.values.pop(index, None)

    def row_columns(self, writer: SourceSchema, *, is_key: bool = False) -> RowColumns:
        """The decoder of many rows of a version, or of their keys."""
        found = self._columns.get((writer.fingerprint, is_key))
        if found is None:
            found = RowColumns(writer.source, writer.key_columns if is_key else writer.columns)
            self._columns[writer.fingerprint, is_key] = found
        return found

    def is_written_as_read(self, writer: SourceSchema, mode: Mode) -> bool:
        """Whether the values of the columns of a version are those of ``row_columns``."""
        if self._objects:
            return False
        reader = self.reader_of(writer.source)
        is_chosen = writer.source in self._chosen
        return reader.fingerprint == writer.fingerprint or (mode == "online" and not is_chosen)

    def _convert(self, writer: SourceSchema, row: dict[str, Any]) -> None:
        """Replace the text of documents and arrays by objects."""
        found = self._converters.get(writer.fingerprint)
        if found is None:
            found = converters(writer) if self._objects else ()
            self._converters[writer.fingerprint] = found
        for name, convert in found:
            text = row[name]
            if isinstance(text, str):
                row[name] = convert(text)

    def _resolved(self, writer: SourceSchema, row: dict[str, Any], mode: Mode) -> dict[str, Any]:
        """The row in the columns of the version that I1 names."""
        revision = self.schemas.revision
        reader = self.reader_of(writer.source)
        if reader.fingerprint == writer.fingerprint:
            self._as_written[writer.fingerprint] = revision
            return row
        if writer.source in self._chosen or mode == "bootstrap" or _has_all(reader, writer):
            return {column.name: row.get(column.name) for column in reader.columns}
        return row


def _has_all(reader: SourceSchema, writer: SourceSchema) -> bool:
    names = {column.name for column in reader.columns}
    return all(column.name in names for column in writer.columns)


class Window:
    """One transaction of the source, or one piece of a bootstrap.

    ``txid`` and ``event_count`` (of all events, filtered out or not) are None until the end
    of the window has been received, and in a bootstrap.
    """

    __slots__ = ("_block", "_end", "_first", "database", "decoding", "mode", "scn")

    def __init__(self, decoding: Decoding, mode: Mode, block: Block, first: int) -> None:
        self.decoding = decoding
        self.database = decoding.database
        self.mode: Mode = mode
        self.scn = block.scns[first]
        self._block = block
        self._first = first
        self._end: tuple[Block, int] | None = None

    def ended_by(self, block: Block, index: int) -> None:
        """The end-of-window frame has arrived."""
        self._end = (block, index)

    @property
    def has_end(self) -> bool:
        """Whether the end of the window has been received."""
        return self._end is not None

    @property
    def _end_frame(self) -> FrameView | None:
        return None if self._end is None else self._end[0].frame(self._end[1])

    @property
    def end_bytes(self) -> bytes:
        """The bytes of the frame that ends it; empty until that has been received."""
        frame = self._end_frame
        return b"" if frame is None else bytes(frame.bytes)

    @property
    def txid(self) -> str | None:
        """The source's transaction id."""
        frame = self._end_frame
        return None if frame is None else bytes(frame.key).decode(errors="replace")

    @property
    def event_count(self) -> int | None:
        """How many events the window had at the source."""
        frame = self._end_frame
        return None if frame is None else frame.event_count

    @property
    def is_dump(self) -> bool:
        """Whether it holds rows of a dump; False until its end has been received."""
        frame = self._end_frame
        return frame is not None and bool(frame.flags & Flag.DUMP)

    @property
    def commit_us(self) -> int:
        """When the source committed it, microseconds since the epoch, UTC."""
        return int(self._block.frame(self._first).commit_us)

    @property
    def commit_time(self) -> dt.datetime:
        """When the source committed it, in UTC."""
        return _EPOCH + dt.timedelta(microseconds=self.commit_us)

    def __repr__(self) -> str:
        return f"<Window {self.database} {self.mode} scn={self.scn} txid={self.txid}>"


class Event:
    """One row change.

    Invariants:
        I1. The event holds its block of bytes, so the application may store the event; ``frame``
            is a view of the block.

    Raises:
        FormatError: the bytes of ``key``, ``value`` or ``before`` are not of their schema.
        UnknownSchema: the schema of the row is not known.
    """

    __slots__ = ("_block", "_index", "_value", "window")

    def __init__(self, block: Block, index: int, window: Window) -> None:
        self._block = block
        self._index = index
        self._value: Any = _UNREAD
        self.window = window

    @property
    def database(self) -> str:
        """The database."""
        return self.window.database

    @property
    def source(self) -> str:
        """The table, as schema.table."""
        return self.schema.source

    @property
    def op(self) -> str:
        """c inserted, u updated, d deleted, r read by a dump, t truncated."""
        return OP_LETTERS[self._block.ops[self._index]]

    @property
    def scn(self) -> int:
        """The commit's number on the source's clock."""
        return self._block.scns[self._index]

    @property
    def seq(self) -> int:
        """The event's index within the scn, counting unfiltered events."""
        return self._block.seqs[self._index]

    @property
    def position(self) -> Position:
        """(scn, seq): unique in the stream, and the same each time the event comes."""
        return self._block.position(self._index)

    @property
    def schema(self) -> SourceSchema:
        """The version of the source that the row was written with."""
        return self.window.decoding.schemas.by_fingerprint(self._block.schema_fps[self._index])

    @property
    def key(self) -> dict[str, Any]:
        """The key's columns; empty for a truncate."""
        if self._block.ops[self._index] == Op.TRUNCATE:
            return {}
        return self.schema.decode_key(self._view.key)

    @property
    def key_bytes(self) -> bytes:
        """The key as Avro bytes: equal for equal keys."""
        return bytes(self._view.key)

    @property
    def key_hash(self) -> int:
        """xxh3 of the key bytes; partitions are defined by it."""
        return self._block.key_hashes[self._index]

    @property
    def value(self) -> dict[str, Any] | None:
        """The row after the change, without ``absent`` columns; None after a delete.

        It is decoded at the first access, and the same object at each further one.
        """
        value: dict[str, Any] | None = self._value
        if value is _UNREAD:
            window = self.window
            value = self._value = window.decoding.value(self._block, self._index, window.mode)
        return value

    def as_(self, model: type[T]) -> T | None:
        """The row after the change as an object of ``model``; None after a delete.

        ``model`` is a dataclass, a TypedDict or a pydantic model.  Its fields are columns by name;
        further columns are left out.  Values are checked by type and converted as pydantic does
        it.  ``databus schema SOURCE --python`` prints such a class.

        Raises:
            UsageError: the row lacks a column that the class requires, or a value does not fit.
        """
        value = self.value
        if value is None:
            return None
        return row_as(model, value, f"the row of {self.source} at {self.position}", self.absent)

    @property
    def before(self) -> dict[str, Any] | None:
        """The row before the change; None if the source does not give it."""
        before = self._view.before
        if before is None:
            return None
        return self.window.decoding.row(self.schema, before, self.window.mode)

    @property
    def absent(self) -> frozenset[str]:
        """Columns that the source left out of ``value`` because they did not change."""
        view = self._view
        return frozenset(self.schema.absent_names(view.absent)) if view.absent_len else frozenset()

    @property
    def txid(self) -> str | None:
        """The source's transaction id, once the window's end has been received."""
        return self.window.txid

    @property
    def commit_us(self) -> int:
        """When the source committed it, microseconds since the epoch, UTC."""
        return int(self._view.commit_us)

    @property
    def commit_time(self) -> dt.datetime:
        """When the source committed it, in UTC."""
        return _EPOCH + dt.timedelta(microseconds=self._view.commit_us)

    @property
    def frame(self) -> memoryview:
        """The bytes of the frame."""
        return self._view.bytes

    @property
    def frames(self) -> bytes:
        """The bytes of the frame, and of its window's end if that has been received."""
        end = self.window.end_bytes
        return bytes(self._view.bytes) + end

    @property
    def _view(self) -> FrameView:
        return self._block.frame(self._index)

    def __repr__(self) -> str:
        return f"<Event {self.op} {self.source} {self.position}>"
