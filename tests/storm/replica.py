"""What a consumer holds that applies every frame of a stream, states of tables included."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import decimal
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from databus.common.checkpoint import ORIGIN
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Flag, FrameView, Op
from databus.common.schema.source_schema import SourceSchema
from databus.common.table_state import CaptureState, TableState, decode_table_state
from databus.relay.ring.ring import Ring
from databus.relay.ring.schema_registry import RegistryReader

Row = dict[str, Any]
Key = tuple[Any, ...]
REMEMBERED = 24
"""Frames of a table whose text a replica stores, for a report."""


@dataclasses.dataclass
class Held:
    """One row, and the schema with which it came last."""

    values: Row
    fingerprint: int


@dataclasses.dataclass
class Table:
    """The rows of a source by key, and the newest schema that the stream named.

    ``since_scn``: when its first frame came.
    """

    schema: SourceSchema | None = None
    since_scn: int = 0
    rows: dict[Key, Held] = dataclasses.field(default_factory=dict)

    def is_newest(self, held: Held) -> bool:
        """Whether a row came with the newest schema."""
        return self.schema is None or self.schema.fingerprint == held.fingerprint


class Replica:
    """The tables, after the frames that it was given.

    Owner: one thread.  ``schema_of`` gives the schema of a fingerprint.
    """

    def __init__(self, schema_of: Callable[[int], SourceSchema]) -> None:
        self.tables: dict[str, Table] = {}
        self.states: dict[str, TableState] = {}
        self.suspensions: list[TableState] = []
        self.faults: dict[str, list[str]] = {}
        self._doubts: list[tuple[str, str]] = []
        self.history: dict[str, deque[str]] = {}
        self.event_count = 0
        self.position = ORIGIN
        self._schema_of = schema_of

    def apply(self, frames: bytes) -> None:
        """Take whole frames, in the order of the stream."""
        for view in frame_format.iter_frames(frames):
            self._apply(view)

    def state(self, source: str) -> TableState | None:
        """The state of a table that is not followed, as the stream says; None: it is followed."""
        found = self.states.get(source)
        return None if found is None or found.state == CaptureState.FOLLOWED else found

    def _apply(self, view: FrameView) -> None:
        if view.op == Op.END_OF_WINDOW:
            self.position = view.position
            self._end_window(is_dump=bool(view.flags & Flag.DUMP))
        elif view.op == Op.TABLE_STATE:
            state = decode_table_state(bytes(view.after or b""))
            self.states[state.source] = state
            self._remember(state.source, view, f"{state.state}: {state.reason}"[:100])
            if state.state == CaptureState.SUSPENDED:
                self.suspensions.append(state)
                self.faults.pop(state.source, None)
        elif view.op == Op.SCHEMA_CHANGE:
            schema = SourceSchema.from_json(json.loads(bytes(view.after or b"")))
            self._remember(schema.source, view, ", ".join(column.name for column in schema.columns))
            self.adopt(schema, view.scn)
        elif not view.is_control:
            self._apply_row(view)

    def adopt(self, schema: SourceSchema, scn: int = 0) -> Table:
        """Rows keep the columns that are left, under the key of the new schema."""
        table = self.tables.setdefault(schema.source, Table(since_scn=scn))
        old, table.schema = table.schema, schema
        if old is None or old.fingerprint == schema.fingerprint:
            return table
        names = {column.name for column in schema.columns}
        rows: dict[Key, Held] = {}
        for key, held in table.rows.items():
            held.values = {name: held.values[name] for name in held.values if name in names}
            if all(name in held.values for name in schema.key):
                key = tuple(held.values[name] for name in schema.key)
            rows[key] = held
        table.rows = rows
        return table

    def _end_window(self, *, is_dump: bool) -> None:
        """A repair's dump deletes rows that another copy had, and this one has not."""
        for source, what in () if is_dump else self._doubts:
            self.faults.setdefault(source, []).append(what)
        self._doubts.clear()

    def _apply_row(self, view: FrameView) -> None:
        self.event_count += 1
        schema = self._schema_of(view.schema_fp)
        table = self.tables.get(schema.source)
        if table is None or table.schema is None or table.schema.fingerprint != view.schema_fp:
            table = self.adopt(schema, view.scn)
        if view.op == Op.TRUNCATE:
            self._remember(schema.source, view)
            table.rows.clear()
            return
        key = tuple(schema.decode_key(view.key).values())
        self._remember(schema.source, view, str(key))
        fits = key in table.rows or self.state(schema.source) is not None
        # A table may have rows of before it was met.
        if view.op in (Op.DELETE, Op.UPDATE) and not fits and view.scn > table.since_scn:
            what = f"{Op(view.op).name} of {key} at scn {view.scn}, which is not there"
            self._doubts.append((schema.source, what))
        if view.op == Op.DELETE:
            table.rows.pop(key, None)
            return
        assert view.after is not None
        values = schema.decode_row(view.after)
        for name in schema.absent_names(view.absent):
            held = table.rows.get(key)
            values[name] = held.values.get(name) if held is not None else None
        table.rows[key] = Held(values, view.schema_fp)

    def _remember(self, source: str, view: FrameView, words: str = "") -> None:
        line = f"scn {view.scn}, seq {view.seq}: {Op(view.op).name} {words}".rstrip()
        self.history.setdefault(source, deque(maxlen=REMEMBERED)).append(line)

    def marked(self, mark: str) -> int:
        """The number that the marking table has here."""
        table = self.tables.get(mark)
        held = table.rows.get((1,)) if table is not None else None
        return held.values["n"] if held is not None else 0


class RingReplica(Replica):
    """Follows the ring in a folder from its first frame, or from its end.

    Owner: one thread.  ``read`` applies what is new.
    Raises: ReaderOvertaken if the ring is too small for a case.
    """

    def __init__(self, folder: Path, *, at_end: bool = False) -> None:
        super().__init__(self._schema)
        self._registry = RegistryReader(folder / "schemas.jsonl")
        self._reader = Ring.open_reader(folder)
        start = self._reader.snapshot()
        self._ring_position = start.tail if at_end else start.head

    def close(self) -> None:
        """Release the ring's files."""
        self._reader.close()

    def read(self) -> None:
        """Apply every frame that was published since."""
        tail = self._reader.snapshot().tail
        while self._ring_position < tail:
            frames, self._ring_position = self._reader.read(self._ring_position, 1 << 22)
            if not frames:
                break
            self.apply(bytes(frames))

    def _schema(self, fingerprint: int) -> SourceSchema:
        self._registry.refresh()
        return self._registry.schemas.by_fingerprint(fingerprint)


def differences(columns: list[str], key: list[str], rows: list[Row], table: Table) -> list[str]:
    """Where a replica's table is not what a SELECT gave; ``key`` are the key's columns there.

    A row that came before a column was added has NULL there.
    """
    left = {tuple(map(of_key, k)): held for k, held in table.rows.items()}
    found = []
    for row in rows:
        values = tuple(of_key(row[name]) for name in key)
        held = left.pop(values, None)
        if held is None:
            found.append(f"row {values} is missing: {row}")
            continue
        for name in columns:
            value = held.values.get(name)
            if not alike(row[name], value):
                old = "" if table.is_newest(held) else " (from before the last definition)"
                found.append(f"row {values}: {name} = {value!r}, not {row[name]!r}{old}")
    return found + [
        f"row {values} is there no more: {held.values}" for values, held in left.items()
    ]


def plain(value: Any) -> Any:
    """A value as it is compared, whichever driver gave it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, decimal.Decimal | int):
        return decimal.Decimal(value)
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.UTC).replace(tzinfo=None)
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def of_key(value: Any) -> Any:
    """A value of a key: a document, which a driver may give as an object, as its JSON."""
    value = plain(value)
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def alike(one: Any, other: Any) -> bool:
    """Whether the source's value is the replica's."""
    one, other = plain(one), plain(other)
    if one == other:
        return True
    if one is None or other is None:
        return False
    if isinstance(one, dict | list) and isinstance(other, str):
        return bool(json.loads(other) == one)
    if isinstance(one, str) and isinstance(other, str) and one[:1] in "{[":
        try:
            return bool(json.loads(one) == json.loads(other))
        except ValueError:
            return False
    return False
