"""Assembles pgoutput messages into windows of frames.  Pure: it does no I/O.

The caller feeds blocks of messages in stream order.  This module packs the messages that the
compiled kernel cannot pack, with equal bytes; without numba it packs all of them.  At a Relation
message it pauses: the caller reads the table's catalogue entry and then calls ``learn``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np

from databus.common.compiled import kernels as common_kernels
from databus.common.compiled.kernels import U8Array
from databus.common.errors import FormatError, UnsupportedChange
from databus.common.frame.frame_format import Op, pack_frame
from databus.common.frame.window_builder import WindowBuilder, end_of_window
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.announced_schemas import AnnouncedSchemas, NewSchemas
from databus.relay.sources.configured_keys import NO_KEYS, ConfiguredKeys
from databus.relay.sources.postgres.kernels import pgoutput_kernels
from databus.relay.sources.postgres.kernels.pgoutput_kernels import (
    CHANGED_AFTER,
    COMMIT_US,
    IN_TRANSACTION,
    RESOLVED,
    SCN,
    SEQ,
    XID,
)
from databus.relay.sources.postgres.protocol import pgoutput_messages
from databus.relay.sources.postgres.protocol.lsn import scn_before
from databus.relay.sources.postgres.protocol.pgoutput_messages import (
    UNCHANGED,
    Change,
    Relation,
    Value,
)
from databus.relay.sources.postgres.protocol.text_encodings import UTF8
from databus.relay.sources.postgres.rows.postgres_kernel_tables import PostgresKernelTables
from databus.relay.sources.postgres.rows.row_codec import RowCodec
from databus.relay.sources.postgres.stream.table_names import TableNames
from databus.relay.sources.postgres.tables.postgres_tables import (
    PostgresTable,
    matches,
    schema_of,
)
from databus.relay.sources.postgres.tables.table_definitions import DefinitionGap
from databus.relay.sources.suspended_tables import SuspendedTables

PART_BYTES = 1 << 20
"""A batch ends after this many bytes, even inside a window."""

_log = logging.getLogger(__name__)


class WindowAssembler:
    """Packs one stream's transactions into windows.

    The scn of a window is the LSN where its commit record starts (docs/decisions/0011).  A
    schema change has a window of its own: at scn - 1 if the window that first uses the schema
    has no event yet, at scn + 1 otherwise.  LSNs are multiples of 8, so both are free, and a
    window that is read again has the same seqs whatever was announced before it.

    Invariants:
        I1. scns grow strictly; a window's events have the seqs 0, 1, 2, ...
        I2. ``take`` returns whole frames, and with them or earlier every schema that they use.
        I3. ``resolved`` is below the scn of every commit still to come, and at or above the scn
            of every window that has ended.
        I4. Between two calls the kernel's state and tables describe the stream so far.
        I5. A table without a key, or with a row that cannot be converted, is suspended: none of
            its rows is packed from that row on, until it resumes between two transactions.

    ``suspended`` are the suspended tables, ``announced`` the schemas that were published last,
    ``names`` the tables that a discovery has found: changes of another table with such a name
    are left out.  ``truncated_by`` has the xid of each table's last TRUNCATE, by oid.

    Owner: the task that reads the stream.
    Raises: FormatError; the assembler cannot be used after it.
    """

    def __init__(
        self,
        globs: tuple[str, ...],
        special_values: str,
        resolved: int,
        *,
        keys: ConfiguredKeys = NO_KEYS,
        compiled: bool = common_kernels.COMPILED,
        suspended: SuspendedTables | None = None,
        announced: AnnouncedSchemas | None = None,
        encoding: str = UTF8,
        names: TableNames | None = None,
    ) -> None:
        self._globs = globs
        self._names = names or TableNames()
        self._special_values = special_values
        self._keys = keys
        self._compiled = compiled
        self._encoding = encoding
        self._codecs: dict[int, RowCodec | None] = {}
        self._partitions: dict[int, tuple[str, str]] = {}
        self._deferred_relations: dict[int, tuple[Relation, PostgresTable | None]] = {}
        self.suspended = suspended or SuspendedTables({})
        self.suspensions_changed = False
        self.announced = announced or AnnouncedSchemas()
        self._left_out = self.suspended.left_out
        self._pending_suspensions: dict[str, DefinitionGap] = {}
        self._by_source: dict[str, int] = {}
        self._schemas_after_window: dict[str, SourceSchema] = {}
        self.truncated_by: dict[int, int] = {}
        self._last_schema_window = (0, 0)
        self._new_schemas = NewSchemas()
        self._ready: list[bytes] = []
        self._ready_bytes = 0
        self._state = np.zeros(pgoutput_kernels.STATE_COUNT, dtype=np.int64)
        self._state[RESOLVED] = resolved
        self._tables = PostgresKernelTables(encoding)
        self._out = np.empty(2 * PART_BYTES, dtype=np.uint8)
        self._handlers: dict[int, Callable[[bytes], None]] = {
            ord("B"): self._on_begin,
            ord("C"): self._on_commit,
            ord("I"): self._on_insert,
            ord("U"): self._on_update,
            ord("D"): self._on_delete,
            ord("T"): self._on_truncate,
        }

    @property
    def resolved(self) -> int:
        """The scn up to which every commit has been fed."""
        return int(self._state[RESOLVED])

    @property
    def scn(self) -> int:
        """The scn of the last transaction."""
        return int(self._state[SCN])

    @property
    def commit_us(self) -> int:
        """When the last transaction was committed, by the server's clock."""
        return int(self._state[COMMIT_US])

    @property
    def is_idle(self) -> bool:
        """Whether no transaction is open."""
        return not self._state[IN_TRANSACTION]

    @property
    def pending_bytes(self) -> int:
        """Bytes that ``take`` would return."""
        return self._ready_bytes

    def run(self, block: U8Array, at: int) -> int:
        """Let the kernel read a block's messages from ``at`` on, as far as it can.

        Returns the offset where it stopped: at the end, at a message for ``feed``, or after
        PART_BYTES of frames.
        """
        if (
            self.suspended.has_requests or self._pending_suspensions
        ) and not self.apply_suspensions():
            self._state[CHANGED_AFTER] = 1  # The kernel leaves the commit to ``_on_commit``.
        if self._names.expects_change and at < len(block):
            self._suspend_leaves(bytes(block[at : at + pgoutput_messages.HEAD_BYTES]))
        if not self._compiled:
            return at
        while at < len(block) and self._ready_bytes < PART_BYTES:
            at, used, why = pgoutput_kernels.transcode(
                block, at, len(block), self._out, 0, self._state,
                *self._tables.arrays,
            )  # fmt: skip
            if used:
                self._put(self._out[:used].tobytes())
            if why == pgoutput_kernels.AT_OTHER:
                break
            if why == pgoutput_kernels.OUT_FULL and not used:
                self._out = np.empty(2 * len(self._out), dtype=np.uint8)
        if len(self._out) > 2 * PART_BYTES:
            self._out = np.empty(2 * PART_BYTES, dtype=np.uint8)
        return at

    def feed(self, kind: int, body: bytes) -> Relation | None:
        """Read one pgoutput message; the caller must call ``learn`` with a returned Relation."""
        handler = self._handlers.get(kind)
        if handler is not None:
            try:
                handler(body)
            except UnsupportedChange as error:
                codec = self._codecs[int.from_bytes(body[:4], "big")]
                assert codec is not None
                self._suspend(codec.schema.source, error.message)
            return None
        if kind == ord("R"):
            return pgoutput_messages.read_relation(body, self._encoding)
        if kind in b"YOM":  # types, origins and logical messages have no row
            return None
        raise FormatError(f"pgoutput sent a message of unknown type {chr(kind)!r}")

    def keepalive(self, wal_end: int) -> None:
        """Everything committed before ``wal_end`` has been fed."""
        if self.is_idle:
            self._state[RESOLVED] = max(self.resolved, scn_before(wal_end))

    def learn(self, relation: Relation, table: PostgresTable | None) -> None:
        """Use a Relation message and the table's catalogue entry for the rows that follow."""
        codec, source, oid = None, relation.source, relation.oid
        self._names.describe(oid, source)
        self._deferred_relations.pop(oid, None)
        if not matches(source, self._globs):
            pass
        elif not self._names.is_table_of(source, oid):
            self._deferred_relations[oid] = relation, table  # Another table has its name so far.
        else:
            try:
                codec = RowCodec(
                    schema_of(relation, table, self._special_values, self._keys),
                    self._special_values,
                    self._encoding,
                )
            except UnsupportedChange as error:
                # A Relation precedes a change of its table; that change is left out.
                self._suspend(source, error.message)
        self._use_codec(oid, codec)

    def add_found(self, oids: Mapping[str, int]) -> None:
        """Record the tables that a discovery found."""
        if self._names.add_found(oids):
            self._update_kernel_tables()

    def assign(self, source: str, oid: int) -> None:
        """From now on the source is this table: rows of an earlier one are left out."""
        if self._names.assign(source, oid):
            self._update_kernel_tables()

    def _missed_by(self, oid: int) -> dict[str, str]:
        """The sources to suspend at the next change of this table, with the reason."""
        return self._captured(self._names.missed_by(oid))

    def _captured(self, reasons: dict[str, str]) -> dict[str, str]:
        """Those of these sources that match the globs and are not left out."""
        return {
            source: why
            for source, why in reasons.items()
            if source not in self._left_out and matches(source, self._globs)
        }

    def skip_partition(self, relation: Relation, root: str) -> None:
        """Record a partition: its changes come under the name of its root.

        A change under the partition's own name suspends the root, which misses that change.
        """
        self._names.describe(relation.oid, relation.source)
        self._codecs[relation.oid] = None
        self._tables.forget(relation.oid)  # The kernel leaves its changes to ``_codec``.
        self._partitions[relation.oid] = (relation.source, root)

    @property
    def leaves(self) -> dict[int, int]:
        """The partitions, with their roots, that received rows since these were taken."""
        return self._names.leaves

    def _suspend_leaves(self, head: bytes) -> None:
        """Suspend partitions that are sources and miss the change whose message begins so."""
        oids = pgoutput_messages.changed_table(head)
        missed = self._names.on_change(*oids) if oids is not None else {}
        for source, why in self._captured(missed).items():
            self._suspend(source, why)

    def _suspend_root(self, oid: int) -> None:
        partition, root = self._partitions.pop(oid)
        self._update_kernel_table(oid)
        if matches(root, self._globs):
            why = (
                f"changes of its partition {partition} came under the partition's own name: the "
                "publication was without publish_via_partition_root, or the table was attached"
            )
            self._suspend(root, why)

    def suspend_again(self, source: str, gap: DefinitionGap) -> None:
        """Suspend a table after the transaction that is being read."""
        if source in self.suspended.left_out:
            if not gap.rows_remain:
                self.suspended.withdraw(source)
            return  # None of its rows is packed until a dump reads the whole table.
        before = self._pending_suspensions.get(source)
        if before is None or (before.rows_remain and not gap.rows_remain):
            self._pending_suspensions[source] = gap
        self.suspended.withdraw(source)

    def redefine(self, source: str, gap: DefinitionGap) -> None:
        """Suspend a table since the transaction that is being read.

        Its next Relation has a new definition, by which its rows can have other values.
        """
        self._suspend(source, gap.why, rows_remain=gap.rows_remain)

    @property
    def has_pending_suspensions(self) -> bool:
        """Whether a table will be suspended at the end of the transaction."""
        return bool(self._pending_suspensions)

    def apply_suspensions(self) -> bool:
        """Between two transactions: suspend and resume tables as requested.

        Returns False if a transaction is open.
        """
        if not self.is_idle:
            return False
        for source, gap in self._pending_suspensions.items():
            if source not in self.suspended.suspensions:
                _log.warning("%s is suspended: %s", source, gap.why)
            if gap.rows_remain:
                self.suspended.suspend(source, self.resolved, gap.why, rows_remain=True)
            else:
                self.suspended.suspend_again(
                    source, self.resolved, gap.why, waits_for=gap.waits_for
                )
            self.suspensions_changed = True
        self._pending_suspensions.clear()
        # A table with ``rows_remain`` has a request at once: a batch must report it before.
        if self.suspended.has_requests and not self.suspensions_changed:
            self.suspended.resume_requested()
            self.suspensions_changed = True
        if self._left_out != self.suspended.left_out:
            self._left_out = self.suspended.left_out
            self._update_kernel_tables()
        return True

    def _suspend(self, source: str, why: str, *, rows_remain: bool = False) -> None:
        """Suspend a table from this change on; its changes are still packed if ``rows_remain``."""
        if source not in self.suspended.suspensions:
            _log.warning("%s is suspended: %s", source, why)
        self.suspended.suspend(source, self._scn(), why, rows_remain=rows_remain)
        self.suspensions_changed = True
        self._left_out = self.suspended.left_out
        self._update_kernel_tables()

    def take(self) -> tuple[bytes, tuple[SourceSchema, ...]]:
        """The frames packed so far, and the schemas first used in them."""
        data = self._ready[0] if len(self._ready) == 1 else b"".join(self._ready)
        self._ready, self._ready_bytes = [], 0
        return data, self._new_schemas.take()

    # -- messages

    def _on_begin(self, body: bytes) -> None:
        begin = pgoutput_messages.read_begin(body)
        if not self.is_idle:
            raise FormatError("pgoutput began a transaction inside another one")
        if begin.commit_lsn <= self.resolved:
            raise FormatError(
                f"the commit at {begin.commit_lsn} comes after {self.resolved} was resolved"
            )
        self._state[[IN_TRANSACTION, SCN, COMMIT_US, XID, SEQ]] = (
            1, begin.commit_lsn, begin.commit_us, begin.xid, 0,
        )  # fmt: skip

    def _on_commit(self, body: bytes) -> None:
        commit, scn = pgoutput_messages.read_commit(body), self._scn()
        if commit.commit_lsn != scn:
            raise FormatError(f"the commit at {commit.commit_lsn} ends a transaction of {scn}")
        seq, commit_us = int(self._state[SEQ]), self.commit_us
        if seq:
            self._put(end_of_window(scn, seq, commit_us, seq, str(self._state[XID])))
        if self._schemas_after_window:
            scn += 1
            for number, schema in enumerate(self._schemas_after_window.values()):
                self._put(_schema_window(schema, scn, 2 * number, commit_us))
                self.announced.put(schema)
            self._schemas_after_window.clear()
        self._state[CHANGED_AFTER] = 0
        self._state[RESOLVED] = scn
        self._state[IN_TRANSACTION] = 0
        self.apply_suspensions()

    def _on_insert(self, body: bytes) -> None:
        change = pgoutput_messages.read_insert(body)
        codec = self._codec(change.oid)
        if codec is not None and change.new is not None:
            self._event(Op.INSERT, change.oid, codec.key(change.new), after=change.new)

    def _on_update(self, body: bytes) -> None:
        change = pgoutput_messages.read_update(body)
        codec = self._codec(change.oid)
        if codec is None or change.new is None:
            return
        new = _with_unchanged_values(change, codec)
        before = change.old if change.old_kind == "O" else None
        new_key = codec.key(new)
        old_key = codec.key(change.old) if change.old_kind else new_key
        if old_key == new_key:
            self._event(Op.UPDATE, change.oid, new_key, before=before, after=new)
        elif UNCHANGED in new:
            # No consumer has a row with the new key, from which the value could be copied.
            raise UnsupportedChange(
                f"{codec.schema.source}.{codec.schema.columns[new.index(UNCHANGED)].name}: an "
                "update changed a row's key and not this large value, which the server does "
                f"not send then; ALTER TABLE {codec.schema.source} REPLICA IDENTITY FULL",
                source=codec.schema.source,
            )
        else:
            self._event(Op.DELETE, change.oid, old_key, before=before)
            self._event(Op.INSERT, change.oid, new_key, after=new)

    def _on_delete(self, body: bytes) -> None:
        change = pgoutput_messages.read_delete(body)
        codec = self._codec(change.oid)
        if codec is not None:
            before = change.old if change.old_kind == "O" else None
            self._event(Op.DELETE, change.oid, codec.key(change.old), before=before)

    def _on_truncate(self, body: bytes) -> None:
        for oid in pgoutput_messages.read_truncate(body).oids:
            self.truncated_by[oid] = int(self._state[XID])
            if self._codec(oid) is not None:
                self._event(Op.TRUNCATE, oid, b"")

    # -- inside

    def _scn(self) -> int:
        if self.is_idle:
            raise FormatError("pgoutput sent a change outside of a transaction")
        return int(self._state[SCN])

    def _codec(self, oid: int) -> RowCodec | None:
        """The codec of the table's rows; None if they are left out."""
        if oid in self._partitions:
            self._suspend_root(oid)
        for source, why in self._missed_by(oid).items():
            self._suspend(source, why)
        if self._can_learn(oid):
            self.learn(*self._deferred_relations[oid])
        try:
            codec = self._codecs[oid]
        except KeyError:
            raise FormatError(f"pgoutput sent a change of the undescribed table {oid}") from None
        if codec is None or codec.schema.source in self._left_out:
            return None
        return codec if self._names.is_table_of(codec.schema.source, oid) else None

    def _can_learn(self, oid: int) -> bool:
        """Whether the source was assigned to this table after its Relation message."""
        relation, _ = self._deferred_relations.get(oid, (None, None))
        return relation is not None and self._names.is_table_of(relation.source, oid)

    def _update_kernel_tables(self) -> None:
        for oid in self._codecs.keys() - self._partitions.keys():
            self._update_kernel_table(oid)

    def _update_kernel_table(self, oid: int) -> None:
        """Set the kernel's table to the result of ``_codec``."""
        if self._missed_by(oid) or self._can_learn(oid):
            return self._tables.forget(oid)  # The kernel leaves its changes to ``_codec``.
        codec = self._codec(oid)
        if codec is None:
            return self._tables.put(oid, None)
        self._tables.put(oid, codec.schema)

    def _event(
        self,
        op: Op,
        oid: int,
        key: bytes,
        *,
        before: tuple[Value, ...] | None = None,
        after: tuple[Value, ...] | None = None,
    ) -> None:
        scn, codec = self._scn(), self._codecs[oid]
        if codec is None:
            return
        schema = codec.schema
        before_bytes = codec.row(before)[0] if before is not None else None
        after_bytes, absent = codec.row(after) if after is not None else (None, b"")
        if codec.schema is not schema:
            # A null widened the schema: both images are written with the wider one.
            before_bytes = codec.row(before)[0] if before is not None else None
            self._use_codec(oid, codec)
        self._put(
            pack_frame(
                op=op,
                scn=scn,
                seq=int(self._state[SEQ]),
                source=codec.schema.source_id,
                schema_fp=codec.schema.fingerprint,
                commit_us=int(self._state[COMMIT_US]),
                key=key,
                before=before_bytes,
                after=after_bytes,
                absent=absent,
            )
        )
        self._state[SEQ] += 1

    def _use_codec(self, oid: int, codec: RowCodec | None) -> None:
        """Use this codec for the table's rows from now on; announce a schema that is new."""
        self._codecs[oid] = codec
        self._partitions.pop(oid, None)
        self._update_kernel_table(oid)
        if codec is None:
            return
        schema = codec.schema
        previous = self._by_source.get(schema.source, self.announced.get(schema.source))
        self._by_source[schema.source] = schema.fingerprint
        self._new_schemas.use(schema, previous)
        if previous is None:
            self.announced.put(schema)
        if previous is None or previous == schema.fingerprint:
            return
        scn, commit_us = self._scn(), int(self._state[COMMIT_US])
        if self._state[SEQ]:
            self._schemas_after_window[schema.source] = schema
            self._state[CHANGED_AFTER] = 1
        else:
            before, seq = self._last_schema_window
            seq = seq if before == scn - 1 else 0
            self._put(_schema_window(schema, scn - 1, seq, commit_us))
            self._last_schema_window = (scn - 1, seq + 2)
            self.announced.put(schema)

    def _put(self, frames: bytes) -> None:
        self._ready.append(frames)
        self._ready_bytes += len(frames)


def _with_unchanged_values(change: Change, codec: RowCodec) -> tuple[Value, ...]:
    """The new row, with its unchanged values from the old tuple.

    A whole old row has all of them; an old key has the key's columns.
    """
    new = change.new or ()
    if not change.old_kind or UNCHANGED not in new:
        return new
    known = range(len(new)) if change.old_kind == "O" else codec.key_indexes
    return tuple(
        change.old[index] if value is UNCHANGED and index in known else value
        for index, value in enumerate(new)
    )


def _schema_window(schema: SourceSchema, scn: int, seq: int, commit_us: int) -> bytes:
    """A window that announces a new schema, with no event in it."""
    window = WindowBuilder(scn, commit_us, seq)
    window.control(
        Op.SCHEMA_CHANGE,
        source=schema.source_id,
        schema_fp=schema.fingerprint,
        after=schema.to_json_bytes(),
    )
    return window.end()
