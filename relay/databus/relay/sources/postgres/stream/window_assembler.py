"""Assembles pgoutput messages into windows of frames.  Pure: it does no I/O.

The caller feeds blocks of messages in stream order.  What the compiled kernel cannot pack is
packed here, message by message, with equal bytes; without numba this is the only path.  At a
Relation message it pauses: the caller looks the table up in the catalogue and then calls
``learn``.
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
"""Frames are given out once so many bytes are packed, even if their window has not ended."""

_log = logging.getLogger(__name__)


class WindowAssembler:
    """Packs one stream's transactions into windows.

    The scn of a window is the LSN where its commit record starts (docs/decisions/0011).  A
    schema change is told in a window of its own: at scn - 1 if the window that first uses it
    has no event yet, at scn + 1 otherwise.  LSNs are multiples of 8, so both are free, and a
    window that is read again has the same seqs whatever was told before it.

    Invariants:
        I1. scns grow strictly; a window's events have the seqs 0, 1, 2, ...
        I2. ``take`` gives whole frames, and with them or earlier every schema that they use.
        I3. ``resolved`` is below the scn of every commit still to come, and not below that of
            a window that has ended.
        I4. Between two calls the kernel's state and tables describe the stream so far.
        I5. A table without a key, or with a row that cannot be converted, is suspended: none of
            its rows is packed from that row on, until it resumes between two transactions.

    ``stopped`` are the tables that have stopped before ``resolved``, ``announced`` the
    schemas that consumers were told of last, ``names`` the tables that a look at the catalogue
    has found: what comes of another one under such a name is older, and was never asked for.
    ``truncated_by`` are the transactions of the tables' last TRUNCATEs, by oid.

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
        self._unlearnt: dict[int, tuple[Relation, PostgresTable | None]] = {}
        self.suspended = suspended or SuspendedTables({})
        self.suspensions_changed = False
        self.announced = announced or AnnouncedSchemas()
        self._left_out = self.suspended.left_out
        self._suspend_next: dict[str, DefinitionGap] = {}
        self._by_source: dict[str, int] = {}
        self._changed_after: dict[str, SourceSchema] = {}
        self.truncated_by: dict[int, int] = {}
        self._before_next = (0, 0)
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
        """An scn up to which every commit has been fed, and none will follow."""
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

        Returns where it stopped: at the end, at a message that must be fed by hand, or where
        enough has gathered to be taken.
        """
        if (self.suspended.has_requests or self._suspend_next) and not self.settle():
            self._state[CHANGED_AFTER] = 1  # The commit comes by hand, and settles it.
        if self._names.is_described_for and at < len(block):
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
        """Read one pgoutput message; a Relation is returned, and ``learn`` must be called next."""
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
        if kind in b"YOM":  # types, origins and logical messages carry no row
            return None
        raise FormatError(f"pgoutput sent a message of unknown type {chr(kind)!r}")

    def keepalive(self, wal_end: int) -> None:
        """Everything committed before ``wal_end`` has been fed."""
        if self.is_idle:
            self._state[RESOLVED] = max(self.resolved, scn_before(wal_end))

    def learn(self, relation: Relation, table: PostgresTable | None) -> None:
        """Go on with this table's new description, and what the catalogue adds to it."""
        codec, source, oid = None, relation.source, relation.oid
        self._names.describe(oid, source)
        self._unlearnt.pop(oid, None)
        if not matches(source, self._globs):
            pass
        elif not self._names.is_meant(source, oid):
            self._unlearnt[oid] = relation, table  # Until it is: its name is another table's.
        else:
            try:
                codec = RowCodec(
                    schema_of(relation, table, self._special_values, self._keys),
                    self._special_values,
                    self._encoding,
                )
            except UnsupportedChange as error:
                # A description comes because a change of its table does, which is passed over.
                self._suspend(source, error.message)
        self._use(oid, codec)

    def meet(self, oids: Mapping[str, int]) -> None:
        """Record the tables that a look at the catalogue found."""
        if self._names.meet(oids):
            self._steer_all()

    def follow_only(self, source: str, oid: int) -> None:
        """A table is about to be read from its beginning: rows of the one that had its name before
        may still come, and are not its."""
        if self._names.assign(source, oid):
            self._steer_all()

    def _strays(self, oid: int) -> dict[str, str]:
        """The sources that are suspended by the next change of this table."""
        strays = self._names.strays(oid).items()
        return {
            source: why
            for source, why in strays
            if source not in self._left_out and matches(source, self._globs)
        }

    def pass_over_partition(self, relation: Relation, root: str) -> None:
        """Go on without a partition.  It is described together with its root, under whose name
        its changes come; one that comes under its own is not in what its root is told of."""
        self._names.describe(relation.oid, relation.source)
        self._codecs[relation.oid] = None
        self._tables.forget(relation.oid)  # The kernel leaves its changes to ``_codec``.
        self._partitions[relation.oid] = (relation.source, root)

    @property
    def leaves(self) -> dict[int, int]:
        """The partitions, with their roots, that rows went to since these were taken away."""
        return self._names.leaves

    def _suspend_leaves(self, head: bytes) -> None:
        """A message begins so behind a description: that of the change which this was for?"""
        oids = pgoutput_messages.changed_table(head)
        found = self._names.changed(*oids) if oids is not None else {}
        for source, why in found.items():
            if source not in self._left_out and matches(source, self._globs):
                self._suspend(source, why)

    def _suspend_root(self, oid: int) -> None:
        partition, root = self._partitions.pop(oid)
        self._steer(oid)
        if matches(root, self._globs):
            why = (
                f"changes of its partition {partition} came under that one's own name: the "
                "publication was without publish_via_partition_root, or the table was attached"
            )
            self._suspend(root, why)

    def suspend_again(self, source: str, gap: DefinitionGap) -> None:
        """Suspend a table after the transaction that is being read."""
        if source in self.suspended.left_out:
            if not gap.rows_remain:
                self.suspended.withdraw(source)
            return  # Nothing of it is packed until it is read from its beginning.
        before = self._suspend_next.get(source)
        if before is None or (before.rows_remain and not gap.rows_remain):
            self._suspend_next[source] = gap
        self.suspended.withdraw(source)

    def redefine(self, source: str, gap: DefinitionGap) -> None:
        """The table that is described next has another definition than before, by which its rows
        may have other values: it is suspended since the transaction that is being read."""
        self._suspend(source, gap.why, rows_remain=gap.rows_remain)

    @property
    def has_pending_suspensions(self) -> bool:
        """Whether a table will be suspended at the end of the transaction."""
        return bool(self._suspend_next)

    def settle(self) -> bool:
        """Between two transactions, resume and suspend tables as requested.

        Returns False inside of one.
        """
        if not self.is_idle:
            return False
        for source, gap in self._suspend_next.items():
            if source not in self.suspended.suspensions:
                _log.warning("%s is suspended: %s", source, gap.why)
            if gap.rows_remain:
                self.suspended.suspend(source, self.resolved, gap.why, rows_remain=True)
            else:
                self.suspended.suspend_again(
                    source, self.resolved, gap.why, waits_for=gap.waits_for
                )
            self.suspensions_changed = True
        self._suspend_next.clear()
        # One that keeps its rows asks at once: a batch has to name it before.
        if self.suspended.has_requests and not self.suspensions_changed:
            self.suspended.resume_requested()
            self.suspensions_changed = True
        if self._left_out != self.suspended.left_out:
            self._left_out = self.suspended.left_out
            self._steer_all()
        return True

    def _suspend(self, source: str, why: str, *, rows_remain: bool = False) -> None:
        """Suspend a table from here on.  One with ``rows_remain`` is named, and its changes are not
        left out."""
        if source not in self.suspended.suspensions:
            _log.warning("%s is suspended: %s", source, why)
        self.suspended.suspend(source, self._scn(), why, rows_remain=rows_remain)
        self.suspensions_changed = True
        self._left_out = self.suspended.left_out
        self._steer_all()

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
        if self._changed_after:
            scn += 1
            for number, schema in enumerate(self._changed_after.values()):
                self._put(_schema_window(schema, scn, 2 * number, commit_us))
                self.announced.put(schema)
            self._changed_after.clear()
        self._state[CHANGED_AFTER] = 0
        self._state[RESOLVED] = scn
        self._state[IN_TRANSACTION] = 0
        self.settle()

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
        new = _filled(change, codec)
        before = change.old if change.old_kind == "O" else None
        new_key = codec.key(new)
        old_key = codec.key(change.old) if change.old_kind else new_key
        if old_key == new_key:
            self._event(Op.UPDATE, change.oid, new_key, before=before, after=new)
        elif UNCHANGED in new:
            # Under its new key no consumer has what it could be filled from.
            raise UnsupportedChange(
                f"{codec.schema.source}.{codec.schema.columns[new.index(UNCHANGED)].name}: an "
                "update changed a row's key and left this large value alone, which the server "
                f"then does not send; ALTER TABLE {codec.schema.source} REPLICA IDENTITY FULL",
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
        for source, why in self._strays(oid).items():
            self._suspend(source, why)
        if self._is_to_learn(oid):
            self.learn(*self._unlearnt[oid])
        try:
            codec = self._codecs[oid]
        except KeyError:
            raise FormatError(f"pgoutput sent a change of the undescribed table {oid}") from None
        if codec is None or codec.schema.source in self._left_out:
            return None
        return codec if self._names.is_meant(codec.schema.source, oid) else None

    def _is_to_learn(self, oid: int) -> bool:
        """Whether the table has become the one that is meant since it was described."""
        relation, _ = self._unlearnt.get(oid, (None, None))
        return relation is not None and self._names.is_meant(relation.source, oid)

    def _steer_all(self) -> None:
        for oid in self._codecs.keys() - self._partitions.keys():
            self._steer(oid)

    def _steer(self, oid: int) -> None:
        """Let the kernel read the table's rows as ``_codec`` says."""
        if self._strays(oid) or self._is_to_learn(oid):
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
            self._use(oid, codec)
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

    def _use(self, oid: int, codec: RowCodec | None) -> None:
        """Read this table's rows so from now on; tell a schema that is not the one before."""
        self._codecs[oid] = codec
        self._partitions.pop(oid, None)
        self._steer(oid)
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
            self._changed_after[schema.source] = schema
            self._state[CHANGED_AFTER] = 1
        else:
            before, seq = self._before_next
            seq = seq if before == scn - 1 else 0
            self._put(_schema_window(schema, scn - 1, seq, commit_us))
            self._before_next = (scn - 1, seq + 2)
            self.announced.put(schema)

    def _put(self, frames: bytes) -> None:
        self._ready.append(frames)
        self._ready_bytes += len(frames)


def _filled(change: Change, codec: RowCodec) -> tuple[Value, ...]:
    """The new row with what the old tuple knows of its unchanged values.

    A whole old row knows all of them; an old key knows the key's columns.
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
    """A window that tells consumers of a new schema, with no event in it."""
    window = WindowBuilder(scn, commit_us, seq)
    window.control(
        Op.SCHEMA_CHANGE,
        source=schema.source_id,
        schema_fp=schema.fingerprint,
        after=schema.to_json_bytes(),
    )
    return window.end()
