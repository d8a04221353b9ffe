"""The decoder for MySQL's groups: other GTID events, and statements without a flag of their own."""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass

from databus.common.errors import SourcePositionLost, UnsupportedChange
from databus.relay.sources.mysql import events, gtid_sets
from databus.relay.sources.mysql.cells import GROUPS_MYSQL
from databus.relay.sources.mysql.charsets import Charsets
from databus.relay.sources.mysql.decoder import BinlogDecoder
from databus.relay.sources.mysql.events import EventType, GtidFlag
from databus.relay.sources.mysql.groups import Group
from databus.relay.sources.mysql.lineage import Mark
from databus.relay.sources.mysql.payload import Payload
from databus.relay.sources.mysql.settings import Settings
from databus.relay.sources.mysql.tables import Catalogue
from databus.relay.sources.mysql.turns import Turn

_OURS, _FOREIGN = 0, -1
_LOGICAL_CLOCK = 2
_MICROSECONDS = 7
_HAS_ORIGINAL = 1 << 55
_WORDS = struct.Struct("<qq")

_REFUSED = {
    EventType.ANONYMOUS_GTID: "a transaction without a GTID (ANONYMOUS_GTID_LOG_EVENT); "
    "set gtid_mode = ON on the server that wrote it",
    EventType.TAGGED_GTID: "a transaction with a tagged GTID (GTID_TAGGED_LOG_EVENT); "
    "let no session set gtid_next = 'AUTOMATIC:tag'",
}


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
        server's turn (``turns.py``).
    Owner: as BinlogDecoder.
    Raises: as BinlogDecoder.
    """

    groups_in_kernel = GROUPS_MYSQL
    textual = events.TEXT_OF_MYSQL

    def __init__(
        self,
        settings: Settings,
        charsets: Charsets,
        catalogue: Catalogue,
        uuids: tuple[str, ...],
        after_scn: int,
        turn: Turn,
    ) -> None:
        super().__init__(settings, charsets, catalogue, _OURS, after_scn)
        self._uuids = uuids
        self._words = [_WORDS.unpack(uuid.UUID(name).bytes) for name in uuids]
        self._turn = turn
        self._before = 0
        self._early: Mark | None = None
        self._outside = False, 0
        self._handlers[EventType.MYSQL_GTID] = self._mysql_gtid
        self._handlers[EventType.TRANSACTION_PAYLOAD] = self._compressed
        for refused in _REFUSED:
            self._handlers[refused] = self._refuse

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
        super().came_to(resolved, last_seq_no, before)

    def txid(self, group: Group) -> str:
        """``<uuid>:<number>``."""
        uuid_ = self._uuids[gtid_sets.generation_of(group.scn)]
        return f"{uuid_}:{gtid_sets.number_of(group.scn)}"

    def _mysql_gtid(self, header: events.Header, body: memoryview, fresh: bool) -> bool:
        gtid = read_mysql_gtid(body)
        if self.group is not None:
            self._forget_group(f"{self._place(header)}: a new group begins")
        ours = gtid.uuid in self._uuids
        scn = gtid_sets.scn_of(self._uuids.index(gtid.uuid), gtid.number) if ours else 0
        commit_us = gtid.commit_us or header.timestamp_s * 1_000_000
        # What a later server has written for itself may stand before the expected one.
        if ours and self.expected is not None:
            generation = gtid_sets.generation_of(self.expected.scn)
            if gtid_sets.generation_of(scn) == generation:
                self._recognise(scn, header, commit_us)
        if ours and scn <= self.last_seq_no:
            raise SourcePositionLost(
                f"{self._place(header)}: GTID {gtid.uuid}:{gtid.number} (scn {scn}) comes after "
                f"scn {self.last_seq_no}; on a replica set replica_preserve_commit_order = ON, "
                "and give the option uuids in the order in which the servers have written"
            )
        self._before = self.last_seq_no
        self.group = Group(
            scn,
            _OURS if ours else _FOREIGN,
            header.server_id,
            commit_us,
            GtidFlag.STANDALONE | GtidFlag.DDL,
            ours and scn > self.resolved,
        )
        if ours:
            self.last_seq_no = scn
        else:
            self.foreign_groups += 1
        return True

    def _end_group(self) -> None:
        group = self.group
        super()._end_group()
        if group is not None and group.domain_id == _OURS:
            self._keep_end(group.scn)  # also of one that is read again

    def _passed(self, group: Group) -> None:
        if not (group.seq or self._counts(group.scn)):
            self._early = Mark(group.scn, group.server_id, group.commit_us)
            self.last_seq_no = self._before
            self._keep_end(group.scn)
            return
        super()._passed(group)
        self._keep_end(group.scn)

    def _counts(self, scn: int) -> bool:
        generation = gtid_sets.generation_of
        # Not by ``resolved``: groups before it may be read again, behind those of its successor.
        return generation(scn) <= generation(self.resolved) or self._turn.has_come(self._before)

    def _keep_end(self, scn: int) -> None:
        """Remember how far each server has come; those before must not write again."""
        ends = [*self.ends, *(0 for _ in self._uuids)][: len(self._uuids)]
        generation = gtid_sets.generation_of(scn)
        ends[generation] = max(ends[generation], gtid_sets.number_of(scn))
        self.ends = tuple(ends)

    def _forget_group(self, why: str) -> None:
        super()._forget_group(why)
        self.last_seq_no = self._before

    def _heartbeat(self, header: events.Header, body: memoryview, fresh: bool) -> bool:
        early = self._early
        if early is None or early.scn <= self.resolved or self.group is not None:
            return True
        if self._turn.has_come(self.last_seq_no):
            self.resolved = self.last_seq_no = early.scn
            self.mark = early
        return True

    def _query(self, header: events.Header, body: memoryview, fresh: bool) -> bool:
        group = self.group
        if group is None:
            return True
        statement = events.read_query(body)[1].strip().upper()
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

    def _compressed(self, header: events.Header, body: memoryview, fresh: bool) -> bool:
        within = self.group
        if within is not None and not within.wanted:
            self._end_group()
        else:
            # Its events are read before the next one of the stream; they have no checksums.
            self.payload = Payload(body, self._place(header))
            self._outside = self.checksums, header.end_offset
            self.checksums = False
        return True

    def end_payload(self) -> None:
        """The payload's events have all been read: go on with the stream's."""
        self.payload = None
        self.checksums, self.offset = self._outside

    def _refuse(self, header: events.Header, body: memoryview, fresh: bool) -> bool:
        within = self.group
        if within is None or within.wanted:
            raise UnsupportedChange(f"{self._place(header)}: {_REFUSED[EventType(header.type)]}")
        return True
