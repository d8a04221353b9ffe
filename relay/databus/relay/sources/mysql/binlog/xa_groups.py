"""The part of the binlog decoder that holds XA transactions until they are completed."""

from __future__ import annotations

from abc import abstractmethod

from databus.relay.sources.mysql.binlog.open_group import PART_BYTES, FrameBuffer, Group
from databus.relay.sources.mysql.binlog.suspensions import Suspensions
from databus.relay.sources.mysql.binlog.xa_transactions import (
    PreparedTransactions,
    read_completion,
    read_prepare,
    xid_text,
)
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.binlog_events import GtidFlag


class XaGroups(Suspensions):
    """Groups that prepare or complete an XA transaction; ``BinlogDecoder`` is the whole.

    Invariants: I3 of BinlogDecoder.
    Owner: as BinlogDecoder.
    """

    out: FrameBuffer
    prepared: PreparedTransactions

    @abstractmethod
    def _xid(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        """Take the event that ends a group without XA."""

    @abstractmethod
    def _end_group(self) -> None:
        """End the open group and, if it has events, its window."""

    @abstractmethod
    def _passed(self, group: Group) -> None:
        """Note that the stream has passed a group of the domain."""

    def _xa_prepare(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        group = self.group
        if group is None or not group.wanted:
            return self._xid(header, body, fresh)
        self.prepared.put(group.scn, self.out.cut_open())
        xid = read_prepare(body)
        if xid is None:
            self._start_replay()
            return True
        self.prepared.store(xid, self.suspended.left_out)
        self.progress.other_groups += 1
        self._passed(group)
        self.group = None
        return True

    def spill(self) -> None:
        """Spool the frames of a large transaction that is being prepared."""
        group = self.group
        if group is not None and group.prepares and self.out.open_bytes >= PART_BYTES:
            self.prepared.put(group.scn, self.out.cut_open())

    def _complete(self, statement: str) -> bool:
        """Whether this is XA COMMIT or XA ROLLBACK; then the group ends, or is replayed."""
        completion = read_completion(statement)
        group = self.group
        assert group is not None
        if completion is None:
            return False
        if not (group.wanted and completion.commits):
            self.prepared.drop(completion.xid)
            self._end_group()
            return True
        for source in self.prepared.lacks_rows_of(completion.xid) - self.suspended.left_out:
            name = xid_text(completion.xid)
            self._suspend_table(
                source, f"rows of it in XA transaction {name} were left out, if any"
            )
        if self.prepared.reopen(completion.xid):
            self._start_replay()
            return True
        self.suspend_captured(
            f"GTID {self.txid(group)} commits XA transaction {xid_text(completion.xid)}, which was "
            "prepared before the binlog that the relay could read"
        )
        self._end_group()
        return True

    def _start_replay(self) -> None:
        group = self.group
        assert group is not None
        group.flags &= ~GtidFlag.PREPARED_XA
        group.seq = group.event_count = 0
        self.prepared.is_replayed = True

    def replay(self) -> None:
        """Add a part of a committed XA transaction to its window."""
        group = self.group
        assert group is not None
        while self.out.open_bytes < PART_BYTES:
            found = self.prepared.next_frame(group.scn, group.seq, group.commit_us)
            if found is None:
                self.prepared.is_replayed = False
                self._end_group()
                return
            self.out.append(found)
            group.seq += 1
            group.event_count += 1
