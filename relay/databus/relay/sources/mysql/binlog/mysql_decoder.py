"""The decoder for MySQL's groups: other GTID events, and statements without a flag of their own."""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass, replace

from databus.common.errors import SourcePositionLost, UnsupportedChange
from databus.relay.sources.mysql.binlog.binlog_decoder import BinlogDecoder
from databus.relay.sources.mysql.binlog.open_group import Group
from databus.relay.sources.mysql.gtid import gtid_sets
from databus.relay.sources.mysql.gtid.mysql_lineage import LineageMark, MySqlResumeState
from databus.relay.sources.mysql.gtid.out_of_order_gtids import OutOfOrderGroup, read_tagged_gtid
from databus.relay.sources.mysql.gtid.promotion import Promotion
from databus.relay.sources.mysql.kernels.kernel_cells import GROUPS_MYSQL
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.binlog_events import EventType, GtidFlag
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.protocol.transaction_payload import Payload
from databus.relay.sources.mysql.rows.charsets import Charsets
from databus.relay.sources.mysql.statements import effects_of
from databus.relay.sources.mysql.statements.logged_statements import logged_statement
from databus.relay.sources.mysql.tables import changed_tables
from databus.relay.sources.mysql.tables.cascades import is_logged
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
    "replica_preserve_commit_order = ON, and let no session leave numbers free with gtid_next"
)


@dataclass(frozen=True, slots=True)
class MySqlGtid:
    """The beginning of a MySQL transaction.  ``commit_us`` is 0 where the event has none."""

    uuid: str
    number: int
    commit_us: int


def read_mysql_gtid(body: memoryview) -> MySqlGtid:
    """A GTID_LOG_EVENT's body: the time is that of the commit on the first server."""
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
    """As BinlogDecoder, with scns made of a server's generation and its GTID numbers.

    Invariants: those of BinlogDecoder.  A group counts as a single statement until its BEGIN.
        A group of a later server that changes nothing captured moves nothing until it is that
        server's turn (``promotion.py``).  A group of ours under a tag, or that comes late, is no
        ``group``: it makes no window, and suspends the captured tables that it changes
        (``out_of_order_gtids.py``).  The resume state has the numbers that may come late still,
        and the tagged ones that have been read.
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
        self._out_of_order: OutOfOrderGroup | None = None
        self._tagged: gtid_sets.GtidSet = {}
        self._tagged_told = ""
        self._missed: gtid_sets.GtidSet = {}
        self._missed_told = ""
        self._handlers[EventType.MYSQL_GTID] = self._mysql_gtid
        self._handlers[EventType.TAGGED_GTID] = self._tagged_gtid
        self._handlers[EventType.ANONYMOUS_GTID] = self._anonymous
        self._handlers[EventType.TRANSACTION_PAYLOAD] = self._compressed

    @property
    def kernel_server(self) -> tuple[int, int, int]:
        """The server that wrote what came last: its groups are the kernel's."""
        generation = gtid_sets.generation_of(self.resolved)
        return *self._words[generation], gtid_sets.scn_of(generation, 0)

    def came_to(self, resolved: int, last_seq_no: int, before: int) -> None:
        """See ``BinlogDecoder``."""
        if resolved != self.resolved:
            self._keep_end(resolved)
        if last_seq_no != self.last_seq_no:
            self._before = before
        self._out_of_order = None
        super().came_to(resolved, last_seq_no, before)

    def out_of_order_from(self, resume_state: MySqlResumeState) -> None:
        """Continue with the GTIDs without an scn that a resume state has."""
        self._tagged_told, self._missed_told = resume_state.tagged, resume_state.missed
        self._tagged = gtid_sets.parse_gtid_set(resume_state.tagged)
        self._missed = gtid_sets.parse_gtid_set(resume_state.missed)

    def resume_state(self) -> MySqlResumeState:
        """See ``BinlogDecoder``."""
        resume_state = super().resume_state()
        if self._tagged_told or self._missed_told:
            return replace(resume_state, tagged=self._tagged_told, missed=self._missed_told)
        return resume_state

    def _miss(self, name: str, missed: gtid_sets.Intervals) -> None:
        self._missed[name] = missed
        self._missed_told = gtid_sets.told(self._missed)

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
        # What a later server has written for itself may stand before the expected one.
        if ours and self.expected is not None:
            generation = gtid_sets.generation_of(self.expected.scn)
            if gtid_sets.generation_of(scn) == generation:
                self._recognise(scn, header, commit_us)
        if ours and scn <= self.last_seq_no:
            if gtid_sets.generation_of(scn) < gtid_sets.generation_of(self.last_seq_no):
                raise SourcePositionLost(
                    f"{self._place(header)}: GTID {gtid.uuid}:{gtid.number} (scn {scn}) comes "
                    f"after scn {self.last_seq_no}; give the option uuids in the order in which "
                    "the servers have written"
                )
            self._out_of_order = OutOfOrderGroup(
                f"GTID {gtid.uuid}:{gtid.number}", _LATE, server=gtid.uuid, number=gtid.number
            )
            return True
        if ours:
            self._note_missed(gtid, gtid_sets.generation_of(scn))
        self._begin_group(scn, _OURS if ours else _FOREIGN, header, commit_us)
        return True

    def _note_missed(self, gtid: MySqlGtid, generation: int) -> None:
        """The numbers between the last one of this server and this one: they may come late.

        Also where groups are read again, which a memo that is older does not tell of.
        """
        if generation == gtid_sets.generation_of(self.last_seq_no):
            last = gtid_sets.number_of(self.last_seq_no)
        elif generation < len(self.ends) and self.ends[generation]:
            last = self.ends[generation]
        else:
            return
        if gtid.number > last + 1:
            known = self._missed.get(gtid.uuid, ())
            self._miss(gtid.uuid, gtid_sets.union(known, ((last + 1, gtid.number - 1),)))

    def _begin_group(
        self, scn: int, domain_id: int, header: binlog_events.Header, commit_us: int
    ) -> None:
        ours = domain_id == _OURS
        self._before = self.last_seq_no
        self.group = Group(
            scn,
            domain_id,
            header.server_id,
            commit_us,
            GtidFlag.STANDALONE | GtidFlag.DDL,
            ours and scn > self.resolved,
        )
        if ours:
            self.last_seq_no = scn
        else:
            self.foreign_groups += 1

    def _leave_group(self, header: binlog_events.Header) -> None:
        if self.group is not None:
            self._forget_group(f"{self._place(header)}: a new group begins")
        self._out_of_order = None

    def _end_group(self) -> None:
        group = self.group
        super()._end_group()
        if group is not None and group.domain_id == _OURS:
            self._keep_end(group.scn)  # also of one that is read again

    def _passed(self, group: Group) -> None:
        if not (group.seq or self._counts(group.scn)):
            self._early = LineageMark(group.scn, group.server_id, group.commit_us)
            self.last_seq_no = self._before
            self._keep_end(group.scn)
            return
        super()._passed(group)
        self._keep_end(group.scn)

    def _counts(self, scn: int) -> bool:
        generation = gtid_sets.generation_of
        # Not by ``resolved``: groups before it may be read again, behind those of its successor.
        return generation(scn) <= generation(self.resolved) or self._promotion.has_come(
            self._before
        )

    def _keep_end(self, scn: int) -> None:
        """Remember how far each server has come; those before must not write again."""
        ends = [*self.ends, *(0 for _ in self._uuids)][: len(self._uuids)]
        generation = gtid_sets.generation_of(scn)
        ends[generation] = max(ends[generation], gtid_sets.number_of(scn))
        self.ends = tuple(ends)

    def _forget_group(self, why: str) -> None:
        super()._forget_group(why)
        self.last_seq_no = self._before

    def _heartbeat(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        early = self._early
        if early is None or early.scn <= self.resolved or self.group is not None:
            return True
        if self._promotion.has_come(self.last_seq_no):
            self.resolved = self.last_seq_no = early.scn
            self.mark = early
        return True

    def _query(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        group = self.group
        if self._out_of_order is not None:
            return self._out_of_order_statement(self._out_of_order, header, body, fresh)
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
            return True  # CREATE TABLE ... SELECT: its rows follow, with the table's map.
        return super()._query(header, body, fresh)

    def _compressed(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        within = self.group
        if within is not None and not within.wanted:
            self._end_group()
        else:
            self._open_payload(Payload(body, self._place(header)))
        return True

    def _anonymous(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        within = self.group
        if within is None or within.wanted:
            raise UnsupportedChange(
                f"{self._place(header)}: a transaction without a GTID (ANONYMOUS_GTID_LOG_EVENT); "
                "set gtid_mode = ON on the server that wrote it"
            )
        return True

    # -- without an scn

    def _tagged_gtid(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        gtid = read_tagged_gtid(body)
        self._leave_group(header)
        if gtid.uuid in self._uuids:
            self._out_of_order = OutOfOrderGroup(
                f"the tagged GTID {gtid}",
                _TAG,
                server=f"{gtid.uuid}:{gtid.tag}",
                number=gtid.number,
            )
        else:
            self._begin_group(0, _FOREIGN, header, header.timestamp_s * 1_000_000)
        return True

    def _out_of_order_statement(
        self, group: OutOfOrderGroup, header: binlog_events.Header, body: memoryview, fresh: bool
    ) -> bool:
        """Suspend the captured tables that a statement changes.

        Raises:
            UnsupportedChange: the statement is one of XA: which tables it changes is known only
                with what was prepared before.
        """
        statement = logged_statement(header, body, self._charsets)
        if group.is_control(statement.text):
            return self._passed_over(group)
        if statement.text.lstrip()[:3].upper() == "XA ":
            raise UnsupportedChange(
                f"{self._place(header)}: {group.name} brings {statement}; {group.why}"
            )
        captured = self._captured()
        found = effects_of(statement, self.dialect, captured)
        if found.needs_knowledge and not fresh:
            self.looks_ahead = self.wants_knowledge = True
            return False
        if found.needs_knowledge:
            found = effects_of(statement, self.dialect, captured, self.known.knowledge())
        self.known.passed(statement)
        for source in changed_tables.sources_of(found.emptied, self.settings):
            self._stop(source, f"{group.name} empties it by {statement}; {group.why}")
        for change in changed_tables.changed_unseen(
            found, captured, self.told.schemas(), {}, self.known.dropped
        ):
            why = f"{group.name}, {statement}: {change.why}; {group.why}"
            self._stop(change.source, why, keeps_rows=change.keeps_rows)
        return self._passed_over(group)

    def _passed_over(self, group: OutOfOrderGroup) -> bool:
        if group.ended:
            self._out_of_order = None
            self.other_groups += 1
            one = ((group.number, group.number),)
            if group.is_tagged:
                read = self._tagged.get(group.server, ())
                self._tagged[group.server] = gtid_sets.union(read, one)
                self._tagged_told = gtid_sets.told(self._tagged)
            else:
                missed = self._missed.get(group.server, ())
                self._miss(group.server, gtid_sets.without(missed, one))
        return True

    def _table_map(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        if self._out_of_order is None:
            return super()._table_map(header, body, fresh)
        self._out_of_order.table_map(body)
        return True

    def _rows(self, header: binlog_events.Header, body: memoryview) -> None:
        group = self._out_of_order
        if group is None:
            return super()._rows(header, body)
        table, cascades = group.table_of(body), self.known.cascades
        changed, kind = {table}, binlog_events.rows_event(header.type, body)[0]
        if kind != EventType.WRITE_ROWS and not is_logged(int.from_bytes(body[6:8], "little")):
            for key in cascades.of(table):
                if key.updates if kind == EventType.UPDATE_ROWS else key.deletes:
                    changed.update(cascades.reached(key))
        for source in changed_tables.sources_of(changed, self.settings):
            why = f"{group.name} changes rows of {'.'.join(table)}; {group.why}"
            self._stop(source, why)
        return None

    def _xid(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        group = self._out_of_order
        if group is None:
            return super()._xid(header, body, fresh)
        group.ended = True
        return self._passed_over(group)
