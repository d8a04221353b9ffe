"""What a consumer holds that applies every frame of a ring, states of tables included."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import json
from pathlib import Path
from typing import Any

from databus.common import frame
from databus.common.frame import FrameView, Op
from databus.common.schema import SourceSchema
from databus.common.table_state import CaptureState, TableState, decode_table_state
from databus.relay.registry import RegistryReader
from databus.relay.ring import Ring

Row = dict[str, Any]
Key = tuple[Any, ...]


@dataclasses.dataclass
class Held:
    """One row, and the schema with which it came last."""

    values: Row
    fingerprint: int


@dataclasses.dataclass
class Table:
    """The rows of a source by key, and the newest schema that the stream named."""

    schema: SourceSchema | None = None
    rows: dict[Key, Held] = dataclasses.field(default_factory=dict)


class Replica:
    """Follows the ring in a folder from its first frame.

    Owner: one thread.  ``read`` applies what is new.
    Raises: ReaderOvertaken if the ring is too small for a case.
    """

    def __init__(self, folder: Path) -> None:
        self.tables: dict[str, Table] = {}
        self.states: dict[str, TableState] = {}
        self.suspensions: list[TableState] = []
        self.faults: list[str] = []
        self.event_count = 0
        self._registry = RegistryReader(folder / "schemas.jsonl")
        self._reader = Ring.open_reader(folder)
        self._position = self._reader.snapshot().head

    def close(self) -> None:
        """Release the ring's files."""
        self._reader.close()

    def read(self) -> None:
        """Apply every frame that was published since."""
        tail = self._reader.snapshot().tail
        while self._position < tail:
            frames, self._position = self._reader.read(self._position, 1 << 22)
            if not frames:
                break
            for view in frame.iter_frames(bytes(frames)):
                self._apply(view)

    def state(self, source: str) -> TableState | None:
        """The state of a table that is not followed, as the stream says; None: it is followed."""
        found = self.states.get(source)
        return None if found is None or found.state == CaptureState.FOLLOWED else found

    def _apply(self, view: FrameView) -> None:
        if view.op == Op.TABLE_STATE:
            state = decode_table_state(bytes(view.after or b""))
            self.states[state.source] = state
            if state.state == CaptureState.SUSPENDED:
                self.suspensions.append(state)
        elif view.op == Op.SCHEMA_CHANGE:
            self._adopt(SourceSchema.from_json(json.loads(bytes(view.after or b""))))
        elif not view.is_control:
            self._apply_row(view)

    def _adopt(self, schema: SourceSchema) -> Table:
        """Rows keep the columns that are left, under the key of the new schema."""
        table = self.tables.setdefault(schema.source, Table())
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

    def _apply_row(self, view: FrameView) -> None:
        self.event_count += 1
        schema = self._schema(view.schema_fp)
        table = self.tables.get(schema.source)
        if table is None or table.schema is None or table.schema.fingerprint != view.schema_fp:
            table = self._adopt(schema)
        if view.op == Op.TRUNCATE:
            table.rows.clear()
            return
        key = tuple(schema.decode_key(view.key).values())
        if view.op == Op.DELETE:
            if table.rows.pop(key, None) is None and self.state(schema.source) is None:
                self.faults.append(f"{schema.source}: DELETE of {key}, which is not there")
            return
        if view.op == Op.UPDATE and key not in table.rows and self.state(schema.source) is None:
            self.faults.append(f"{schema.source}: UPDATE of {key}, which is not there")
        assert view.after is not None
        values = schema.decode_row(view.after)
        for name in schema.absent_names(view.absent):
            held = table.rows.get(key)
            values[name] = held.values.get(name) if held is not None else None
        table.rows[key] = Held(values, view.schema_fp)

    def _schema(self, fingerprint: int) -> SourceSchema:
        self._registry.refresh()
        return self._registry.schemas.by_fingerprint(fingerprint)


def differences(
    columns: list[str], key: list[str], rows: list[Row], table: Table
) -> tuple[list[str], int]:
    """Where a replica's table is not what a SELECT gave; ``key`` are the key's columns there.

    A row that came with an earlier schema may lack columns that were added since, and have its
    values in an earlier type.  The second number counts values of such columns that are not NULL
    at the source: the log has no event that carries them.
    """
    newest = table.schema.fingerprint if table.schema is not None else 0
    left = {tuple(map(plain, k)): held for k, held in table.rows.items()}
    found, unsent = [], 0
    for row in rows:
        values = tuple(plain(row[name]) for name in key)
        held = left.pop(values, None)
        if held is None:
            found.append(f"row {values} is missing: {row}")
            continue
        is_old = held.fingerprint != newest
        for name in columns:
            if name not in held.values:
                unsent += row[name] is not None
            elif not alike(row[name], held.values[name], loosely=is_old):
                found.append(f"row {values}: {name} = {held.values[name]!r}, not {row[name]!r}")
    found += [f"row {values} is there no more: {held.values}" for values, held in left.items()]
    return found, unsent


def plain(value: Any) -> Any:
    """A value as it is compared, whichever driver gave it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, decimal.Decimal | int):
        return decimal.Decimal(value)
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.UTC).replace(tzinfo=None)
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def alike(one: Any, other: Any, *, loosely: bool = False) -> bool:
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
    return loosely and type(one) is not type(other)
