"""From pgoutput messages to windows of frames.  Pure: it neither waits nor asks the database.

The caller feeds messages in stream order.  A Relation message stops the flow: the caller
looks the table up in the catalogue and answers with ``learn``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from databus.common.errors import FormatError, UnsupportedChange
from databus.common.frame import Op, WindowBuilder
from databus.common.schema import SourceSchema
from databus.relay.sources.postgres import pgoutput
from databus.relay.sources.postgres.lsn import scn_before
from databus.relay.sources.postgres.pgoutput import UNCHANGED, Change, Relation, Value
from databus.relay.sources.postgres.rows import RowCodec
from databus.relay.sources.postgres.schema import Table, matches, schema_of

PART_BYTES = 1 << 20
"""A window's frames are handed on when so many are packed, whether it has ended or not."""

_log = logging.getLogger(__name__)


class WindowAssembler:
    """Packs one stream's transactions into windows.

    The scn of a window is the LSN where its commit record starts (docs/decisions/0011).  A
    schema change is told in a window of its own at scn - 1, or at scn + 1 if part of the
    window that first uses it is already gone: LSNs are multiples of 8, so both are free, and
    a window that is read again has the same seqs whatever was told before it.

    Invariants:
        I1. scns grow strictly; a window's seqs count its captured events from 0.
        I2. ``taken`` bytes hold whole frames, and every schema that they use has been taken.
        I3. ``resolved`` is below the scn of every commit still to come, and not below that of
            a window that has ended.

    Owner: the task that reads the stream.
    Raises: UnsupportedChange, FormatError; the assembler is of no use after.
    """

    def __init__(self, globs: tuple[str, ...], special_values: str, resolved: int) -> None:
        self._globs = globs
        self._special_values = special_values
        self.resolved = resolved
        self.refused: dict[str, str] = {}
        self._codecs: dict[int, RowCodec | None] = {}
        self._by_source: dict[str, SourceSchema] = {}
        self._told: set[int] = set()
        self._out = bytearray()
        self._changed_before: dict[str, SourceSchema] = {}
        self._changed_after: dict[str, SourceSchema] = {}
        self._schemas: list[SourceSchema] = []
        self._begin: pgoutput.Begin | None = None
        self._window: WindowBuilder | None = None
        self._part_gone = False
        self._handlers: dict[int, Callable[[bytes], None]] = {
            ord("B"): self._on_begin,
            ord("C"): self._on_commit,
            ord("I"): self._on_insert,
            ord("U"): self._on_update,
            ord("D"): self._on_delete,
            ord("T"): self._on_truncate,
        }

    @property
    def is_idle(self) -> bool:
        """Whether no transaction is under way."""
        return self._begin is None

    @property
    def pending_bytes(self) -> int:
        """Bytes that ``take`` would return."""
        return len(self._out) + (self._window.pending_bytes if self._window else 0)

    def feed(self, kind: int, body: bytes) -> Relation | None:
        """Take one pgoutput message; a Relation is returned and must be ``learn``-ed next."""
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(body)
            return None
        if kind == ord("R"):
            return pgoutput.read_relation(body)
        if kind in b"YOM":  # types, origins and logical messages carry no row
            return None
        raise FormatError(f"pgoutput sent a message of unknown type {chr(kind)!r}")

    def keepalive(self, wal_end: int) -> None:
        """Everything committed before ``wal_end`` has been fed."""
        if self._begin is None:
            self.resolved = max(self.resolved, scn_before(wal_end))

    def learn(self, relation: Relation, table: Table | None) -> None:
        """Go on with this table's new description, and what the catalogue adds to it."""
        if not matches(relation.source, self._globs):
            self._codecs[relation.oid] = None
            return
        try:
            schema = schema_of(relation, table, self._special_values)
        except UnsupportedChange as error:
            # The table stops alone: its neighbours' changes go on.
            if relation.source not in self.refused:
                _log.warning("%s is not captured: %s", relation.source, error)
            self.refused[relation.source] = str(error)
            self._codecs[relation.oid] = None
            return
        self.refused.pop(relation.source, None)
        self._codecs[relation.oid] = RowCodec(schema, self._special_values)
        self._tell(schema)

    def take(self) -> tuple[bytes, tuple[SourceSchema, ...]]:
        """The frames packed so far, and the schemas first used in them."""
        if self._window is not None and self._window.pending_bytes:
            self._flush_changed_before()
            self._out += self._window.take()
            self._part_gone = True
        data, schemas = bytes(self._out), tuple(self._schemas)
        self._out.clear()
        self._schemas.clear()
        return data, schemas

    # -- messages

    def _on_begin(self, body: bytes) -> None:
        if self._begin is not None:
            raise FormatError("pgoutput began a transaction inside another one")
        self._begin = pgoutput.read_begin(body)
        if self._begin.commit_lsn <= self.resolved:
            raise FormatError(
                f"the commit at {self._begin.commit_lsn} comes after {self.resolved} was resolved"
            )
        self._part_gone = False

    def _on_commit(self, body: bytes) -> None:
        commit, begin = pgoutput.read_commit(body), self._transaction()
        if commit.commit_lsn != begin.commit_lsn:
            raise FormatError(
                f"the commit at {commit.commit_lsn} ends a transaction of {begin.commit_lsn}"
            )
        self._flush_changed_before()
        self.resolved = begin.commit_lsn
        if self._window is not None:
            self._out += self._window.end(str(begin.xid))
        if self._changed_after:
            self.resolved = begin.commit_lsn + 1
            self._out += _schema_window(self._changed_after, self.resolved, begin.commit_us)
            self._changed_after.clear()
        self._window, self._begin = None, None

    def _on_insert(self, body: bytes) -> None:
        change = pgoutput.read_insert(body)
        codec = self._codec(change.oid)
        if codec is not None and change.new is not None:
            self._event(Op.INSERT, codec, codec.key(change.new), after=change.new)

    def _on_update(self, body: bytes) -> None:
        change = pgoutput.read_update(body)
        codec = self._codec(change.oid)
        if codec is None or change.new is None:
            return
        new = _filled(change, codec)
        before = change.old if change.old_kind == "O" else None
        new_key = codec.key(new)
        old_key = codec.key(change.old) if change.old_kind else new_key
        if old_key == new_key:
            self._event(Op.UPDATE, codec, new_key, before=before, after=new)
        else:
            self._event(Op.DELETE, codec, old_key, before=before)
            self._event(Op.INSERT, codec, new_key, after=new)

    def _on_delete(self, body: bytes) -> None:
        change = pgoutput.read_delete(body)
        codec = self._codec(change.oid)
        if codec is not None:
            before = change.old if change.old_kind == "O" else None
            self._event(Op.DELETE, codec, codec.key(change.old), before=before)

    def _on_truncate(self, body: bytes) -> None:
        for oid in pgoutput.read_truncate(body).oids:
            codec = self._codec(oid)
            if codec is not None:
                schema = codec.schema
                self._builder().event(Op.TRUNCATE, schema.source_id, schema.fingerprint, b"")

    # -- inside

    def _transaction(self) -> pgoutput.Begin:
        if self._begin is None:
            raise FormatError("pgoutput sent a change outside of a transaction")
        return self._begin

    def _builder(self) -> WindowBuilder:
        if self._window is None:
            begin = self._transaction()
            self._window = WindowBuilder(begin.commit_lsn, begin.commit_us)
        return self._window

    def _codec(self, oid: int) -> RowCodec | None:
        try:
            return self._codecs[oid]
        except KeyError:
            raise FormatError(f"pgoutput sent a change of the undescribed table {oid}") from None

    def _event(
        self,
        op: Op,
        codec: RowCodec,
        key: bytes,
        *,
        before: tuple[Value, ...] | None = None,
        after: tuple[Value, ...] | None = None,
    ) -> None:
        window = self._builder()
        schema = codec.schema
        before_bytes = codec.row(before)[0] if before is not None else None
        after_bytes, absent = codec.row(after) if after is not None else (None, b"")
        if codec.schema is not schema:
            # A null widened the schema: both images are written with the wider one.
            before_bytes = codec.row(before)[0] if before is not None else None
            self._tell(codec.schema)
        window.event(
            op,
            codec.schema.source_id,
            codec.schema.fingerprint,
            key,
            before=before_bytes,
            after=after_bytes,
            absent=absent,
        )

    def _tell(self, schema: SourceSchema) -> None:
        """Register the schema; if the table had another one, tell it to consumers too."""
        previous = self._by_source.get(schema.source)
        self._by_source[schema.source] = schema
        if schema.fingerprint not in self._told:
            self._told.add(schema.fingerprint)
            self._schemas.append(schema)
        if previous is None or previous.fingerprint == schema.fingerprint:
            return
        changed = self._changed_after if self._part_gone else self._changed_before
        changed[schema.source] = schema

    def _flush_changed_before(self) -> None:
        if self._changed_before:
            begin = self._transaction()
            self._out += _schema_window(self._changed_before, begin.commit_lsn - 1, begin.commit_us)
            self._changed_before.clear()


def _filled(change: Change, codec: RowCodec) -> tuple[Value, ...]:
    """The new row with what the old tuple knows of its unchanged values.

    A whole old row knows all of them; an old key knows the key's columns.
    """
    new = change.new or ()
    if not change.old_kind or UNCHANGED not in new:
        return new
    known = range(len(new)) if change.old_kind == "O" else codec.key_places
    return tuple(
        change.old[place] if value is UNCHANGED and place in known else value
        for place, value in enumerate(new)
    )


def _schema_window(changed: dict[str, SourceSchema], scn: int, commit_us: int) -> bytes:
    """A window that tells consumers of the new schemas, with no event in it."""
    window = WindowBuilder(scn, commit_us)
    for schema in changed.values():
        window.control(
            Op.SCHEMA_CHANGE,
            source=schema.source_id,
            schema_fp=schema.fingerprint,
            after=json.dumps(schema.to_json(), separators=(",", ":")).encode(),
        )
    return window.end()
