"""The decoder for MySQL's groups: other GTID events, and statements without a flag of their own."""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass

from databus.common.errors import SourcePositionLost, UnsupportedChange
from databus.relay.sources.mysql import events, gtid_sets
from databus.relay.sources.mysql.charsets import Charsets
from databus.relay.sources.mysql.decoder import BinlogDecoder
from databus.relay.sources.mysql.events import EventType, GtidFlag
from databus.relay.sources.mysql.groups import Group
from databus.relay.sources.mysql.payload import Payload
from databus.relay.sources.mysql.settings import Settings
from databus.relay.sources.mysql.tables import Catalogue

_OURS, _FOREIGN = 0, -1
_LOGICAL_CLOCK = 2
_MICROSECONDS = 7
_HAS_ORIGINAL = 1 << 55

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
    Owner: as BinlogDecoder.
    Raises: as BinlogDecoder.
    """

    groups_in_kernel = False

    def __init__(
        self,
        settings: Settings,
        charsets: Charsets,
        catalogue: Catalogue,
        uuids: tuple[str, ...],
        after_scn: int,
    ) -> None:
        super().__init__(settings, charsets, catalogue, _OURS, after_scn)
        self._uuids = uuids
        self._outside = False, 0
        self._handlers[EventType.MYSQL_GTID] = self._mysql_gtid
        self._handlers[EventType.TRANSACTION_PAYLOAD] = self._compressed
        for refused in _REFUSED:
            self._handlers[refused] = self._refuse

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
        if ours:
            self._recognise(scn, header, commit_us)
        if ours and scn <= self.last_seq_no:
            raise SourcePositionLost(
                f"{self._place(header)}: GTID {gtid.uuid}:{gtid.number} (scn {scn}) comes after "
                f"scn {self.last_seq_no}; on a replica set replica_preserve_commit_order = ON, "
                "and give the option uuids in the order in which the servers have written"
            )
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
