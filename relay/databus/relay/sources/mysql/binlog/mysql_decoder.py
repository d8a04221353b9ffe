"""The decoder of MySQL's groups: its GTID events, and statements that no flag announces."""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass, replace

from databus.common.errors import SourcePositionLost, UnsupportedChange
from databus.relay.sources.mysql.binlog.binlog_decoder import BinlogDecoder
from databus.relay.sources.mysql.binlog.groups_without_scn import GroupWithoutScn
from databus.relay.sources.mysql.binlog.open_group import Group
from databus.relay.sources.mysql.binlog.xa_transactions import Xid, read_completion
from databus.relay.sources.mysql.gtid import gtid_sets
from databus.relay.sources.mysql.gtid.mysql_lineage import LineageMark, MySqlResumeState
from databus.relay.sources.mysql.gtid.out_of_order_gtids import read_tagged_gtid
from databus.relay.sources.mysql.gtid.promotion import Promotion
from databus.relay.sources.mysql.gtid.unordered_gtids import UnorderedGtids
from databus.relay.sources.mysql.kernels.kernel_cells import GROUPS_MYSQL
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.binlog_events import EventType, GtidFlag
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.protocol.transaction_payload import Payload
from databus.relay.sources.mysql.rows.charsets import Charsets
from databus.relay.sources.mysql.statements.logged_statements import logged_statement
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue

_OURS, _FOREIGN = 0, -1
_LOGICAL_CLOCK = 2
_MICROSECONDS = 7
_HAS_ORIGINAL = 1 << 55
_WORDS = struct.Struct("<qq")
_TAG = (
    "a tagged GTID has no scn: no session that changes a captured table may set gtid_next to a tag"
)
_LATE = (
    "it comes after larger numbers, so it has no scn: on a replica set "
    "replica_preserve_commit_order = ON, and let no session skip numbers with gtid_next"
)


_UNLISTED = (
    "the relay does not follow that server: list it in the option uuids if it takes over, and let "
    "it change no captured table before"
)


@dataclass(frozen=True, slots=True)
class _Unnumbered:
    """A GTID that has no scn.  ``server`` is ``uuid`` or, under a tag, ``uuid:tag``."""

    server: str
    number: int
    why: str

    @property
    def gtid(self) -> str:
        return f"{self.server}:{self.number}"


_NONE = _Unnumbered("", 0, "")


@dataclass(frozen=True, slots=True)
class MySqlGtid:
    """The beginning of a MySQL transaction.  ``commit_us`` is 0 if the event has none."""

    uuid: str
    number: int
    commit_us: int


def read_mysql_gtid(body: memoryview) -> MySqlGtid:
    """Read a GTID_LOG_EVENT's body; the time is that of the commit on the first server."""
    (number,) = struct.unpack_from("<q", body, 17)
    commit_us = 0
    times = 42
    if len(body) >= times + _MICROSECONDS and body[25] == _LOGICAL_CLOCK:
        commit_us = int.from_bytes(body[times : times + _MICROSECONDS], "little")
        if commit_us & _HAS_ORIGINAL:
            original = body[times + _MICROSECONDS : times + 2 * _MICROSECONDS]
            commit_us = int.from_bytes(original, "little")
    return MySqlGtid(str(uuid.UUID(bytes=bytes(body[1:17]))), number, commit_us)


class MySqlDecoder(BinlogDecoder):
    """A BinlogDecoder whose scns consist of a server's generation and its GTID numbers.

    Invariants: those of BinlogDecoder.  A group counts as a single statement until its BEGIN.
        A group of a later server that changes no captured table does not advance the scn before
        that server's promotion (``promotion.py``).  A group with a tagged or out-of-order GTID and
        one of a server that is not configured have no scn (``groups_without_scn.py``).  The resume
        state has the numbers that may still come, and the GTIDs without an scn that were read.
    Owner: as BinlogDecoder.
    Raises: as BinlogDecoder.
    """

    groups_in_kernel = GROUPS_MYSQL
    textual = binlog_events.TEXT_OF_MYSQL
    is_mysql = True

    def __init__(
        self,
        settings: MySqlSettings,
        charsets: Charsets,
        catalogue: Catalogue,
        uuids: tuple[str, ...],
        after_scn: int,
        promotion: Promotion,
    ) -> None:
        super().__init__(settings, charsets, catalogue, _OURS, after_scn)
        self._uuids = uuids
        self._words = [_WORDS.unpack(uuid.UUID(name).bytes) for name in uuids]
        self._promotion = promotion
        self._before = 0
        self._early: LineageMark | None = None
        self._unnumbered = _NONE
        self._unordered = UnorderedGtids(uuids)
        self._held: dict[Xid, _Unnumbered] = {}
        self._handlers[EventType.MYSQL_GTID] = self._mysql_gtid
        self._handlers[EventType.TAGGED_GTID] = self._tagged_gtid
        self._handlers[EventType.ANONYMOUS_GTID] = self._anonymous
        self._handlers[EventType.TRANSACTION_PAYLOAD] = self._compressed

    @property
    def kernel_server(self) -> tuple[int, int, int]:
        """The server of the last group: the kernel reads its groups."""
        generation = gtid_sets.generation_of(self.progress.resolved)
        return *self._words[generation], gtid_sets.scn_of(generation, 0)

    def came_to(self, resolved: int, last_seq_no: int, before: int) -> None:
        """See ``BinlogDecoder``."""
        if resolved != self.progress.resolved:
            self._record_end(resolved)
        if last_seq_no != self.progress.last_seq_no:
            self._before = before
        super().came_to(resolved, last_seq_no, before)

    def continue_from(self, resume_state: MySqlResumeState) -> None:
        """Continue with the GTIDs without an scn that a resume state has."""
        self._unordered.restore(
            resume_state.tagged, resume_state.foreign or "", resume_state.missed
        )

    def resume_state(self) -> MySqlResumeState:
        """See ``BinlogDecoder``."""
        found = self._unordered
        return replace(
            super().resume_state(), tagged=found.tagged, missed=found.missed, foreign=found.foreign
        )

    def txid(self, group: Group) -> str:
        """``<uuid>:<number>``."""
        uuid_ = self._uuids[gtid_sets.generation_of(group.scn)]
        return f"{uuid_}:{gtid_sets.number_of(group.scn)}"

    def _mysql_gtid(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        gtid = read_mysql_gtid(body)
        self._leave_group(header)
        ours = gtid.uuid in self._uuids
        scn = gtid_sets.scn_of(self._uuids.index(gtid.uuid), gtid.number) if ours else 0
        commit_us = gtid.commit_us or header.timestamp_s * 1_000_000
        # A later server's own transactions may come before the expected one.
        if ours and self.progress.expected is not None:
            generation = gtid_sets.generation_of(self.progress.expected.scn)
            if gtid_sets.generation_of(scn) == generation:
                mark = LineageMark(scn, header.server_id, commit_us)
                self.progress.recognise(mark, self.cursor.where(header))
        if ours and scn <= self.progress.last_seq_no:
            if gtid_sets.generation_of(scn) < gtid_sets.generation_of(self.progress.last_seq_no):
                raise SourcePositionLost(
                    f"{self.cursor.where(header)}: GTID {gtid.uuid}:{gtid.number} (scn {scn}) "
                    f"comes after scn {self.progress.last_seq_no}; give the option uuids in the "
                    "order in which the servers have written"
                )
            return self._begin_unnumbered(_Unnumbered(gtid.uuid, gtid.number, _LATE), header)
        if not ours:
            self.progress.foreign_groups += 1
            return self._begin_unnumbered(_Unnumbered(gtid.uuid, gtid.number, _UNLISTED), header)
        self._note_missed(gtid, gtid_sets.generation_of(scn))
        self._begin_group(scn, _OURS, header, commit_us)
        self.progress.last_seq_no = scn
        return True

    def _note_missed(self, gtid: MySqlGtid, generation: int) -> None:
        """Note the numbers between this server's last one and this one: they may still come.

        Also for groups that are read again, since an older resume state does not have them.
        """
        if generation == gtid_sets.generation_of(self.progress.last_seq_no):
            last = gtid_sets.number_of(self.progress.last_seq_no)
        elif generation < len(self.progress.ends) and self.progress.ends[generation]:
            last = self.progress.ends[generation]
        else:
            return
        if gtid.number > last + 1:
            self._unordered.note_missed(gtid.uuid, last + 1, gtid.number - 1)

    def _begin_group(
        self, scn: int, domain_id: int, header: binlog_events.Header, commit_us: int
    ) -> None:
        ours = domain_id == _OURS
        self._before = self.progress.last_seq_no
        self.group = Group(
            scn,
            domain_id,
            header.server_id,
            commit_us,
            GtidFlag.STANDALONE | GtidFlag.DDL,
            ours and scn > self.progress.resolved,
            is_examined=not ours,
        )

    def _begin_unnumbered(self, found: _Unnumbered, header: binlog_events.Header) -> bool:
        self._unnumbered, self._without_scn = found, None
        self._begin_group(0, _FOREIGN, header, header.timestamp_s * 1_000_000)
        return True

    def _leave_group(self, header: binlog_events.Header) -> None:
        if self.group is not None:
            self._forget_group(f"{self.cursor.where(header)}: a new group begins")

    def _end_group(self) -> None:
        group = self.group
        super()._end_group()
        if group is not None and group.domain_id == _OURS:
            self._record_end(group.scn)  # also of one that is read again

    def _passed(self, group: Group) -> None:
        if not (group.seq or self._counts(group.scn)):
            self._early = LineageMark(group.scn, group.server_id, group.commit_us)
            self.progress.last_seq_no = self._before
            self._record_end(group.scn)
            return
        super()._passed(group)
        self._record_end(group.scn)

    def _counts(self, scn: int) -> bool:
        generation = gtid_sets.generation_of
        # Not by ``resolved``: groups before it may be read again, after those of its successor.
        return generation(scn) <= generation(self.progress.resolved) or self._promotion.has_come(
            self._before
        )

    def _record_end(self, scn: int) -> None:
        """Record each server's last number; after a promotion its predecessors must not write."""
        ends = [*self.progress.ends, *(0 for _ in self._uuids)][: len(self._uuids)]
        generation = gtid_sets.generation_of(scn)
        ends[generation] = max(ends[generation], gtid_sets.number_of(scn))
        self.progress.ends = tuple(ends)

    def _forget_group(self, why: str) -> None:
        super()._forget_group(why)
        self.progress.last_seq_no = self._before

    def _heartbeat(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        early = self._early
        if early is None or early.scn <= self.progress.resolved or self.group is not None:
            return True
        if self._promotion.has_come(self.progress.last_seq_no):
            self.progress.resolved = self.progress.last_seq_no = early.scn
            self.progress.mark = early
        return True

    def _query(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        group = self.group
        if group is None:
            return True
        statement = binlog_events.read_query(body)[1].strip().upper()
        if statement == "BEGIN":
            group.flags = GtidFlag.TRANSACTIONAL
            return True
        if group.standalone and statement.startswith("XA START"):
            group.flags = GtidFlag.TRANSACTIONAL | GtidFlag.PREPARED_XA
            group.wanted = group.domain_id == _OURS
            return True
        if statement.startswith("CREATE TABLE") and statement.endswith("START TRANSACTION"):
            self.known.pass_keys(logged_statement(header, body, self._charsets), self.dialect)
            return True  # CREATE TABLE ... SELECT: its rows follow, with the table's map.
        return super()._query(header, body, fresh)

    def _compressed(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        within = self.group
        if within is not None and not (within.wanted or within.is_examined):
            self._end_group()
        else:
            self.cursor.payload = Payload(body, self.cursor.where(header))
        return True

    def _anonymous(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        within = self.group
        if within is None or within.wanted:
            raise UnsupportedChange(
                f"{self.cursor.where(header)}: a transaction without a GTID "
                "(ANONYMOUS_GTID_LOG_EVENT); set gtid_mode = ON on the server that wrote it"
            )
        return True

    # -- without an scn

    def _tagged_gtid(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        gtid = read_tagged_gtid(body)
        self._leave_group(header)
        ours = gtid.uuid in self._uuids
        self.progress.foreign_groups += not ours
        found = _Unnumbered(f"{gtid.uuid}:{gtid.tag}", gtid.number, _TAG if ours else _UNLISTED)
        return self._begin_unnumbered(found, header)

    def _described(self, group: Group) -> GroupWithoutScn:
        gtid, why = self._unnumbered.gtid, self._unnumbered.why
        tagged = "the tagged " if why == _TAG else ""
        return GroupWithoutScn(gtid, f"{tagged}GTID {gtid}", why)

    def _was_examined(self, group: Group) -> None:
        if self._unnumbered not in self._held.values():
            self._note_read(self._unnumbered)

    def _note_read(self, found: _Unnumbered) -> None:
        self.progress.other_groups += found.why != _UNLISTED
        if found.why == _LATE:
            self._unordered.note_late(found.server, found.number)
        else:
            self._unordered.note_read(found.server, found.number)

    def _hold(self, xid: Xid, scn: int, changed: frozenset[str]) -> None:
        # Not read until it is completed: the server sends it again after a restart.
        self._held[xid] = self._unnumbered
        super()._hold(xid, scn, changed)

    def _complete(self, statement: str) -> bool:
        if not super()._complete(statement):
            return False
        completion = read_completion(statement)
        if completion is not None and completion.xid in self._held:
            self._note_read(self._held.pop(completion.xid))
        return True
