"""The part of the binlog decoder for groups that have no scn.

They are those of domains and servers that are not followed, and those with a tagged or
out-of-order GTID.  Such a group makes no window.  Each captured table that it changes, or may
change, is suspended, with the children of its cascades (decisions 0088, 0089).  Its other tables
cost nothing: the kernel skips rows of tables that are not captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from databus.common.frame.frame_format import source_id
from databus.common.schema.source_names import join_source
from databus.relay.sources.mysql.binlog.event_cursor import EventCursor
from databus.relay.sources.mysql.binlog.lookahead_request import LookaheadRequest
from databus.relay.sources.mysql.binlog.open_group import Group
from databus.relay.sources.mysql.binlog.xa_groups import XaGroups
from databus.relay.sources.mysql.binlog.xa_transactions import (
    Xid,
    read_completion,
    read_prepare,
    xid_text,
)
from databus.relay.sources.mysql.gtid.foreign_gtids import read_gtid_list
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.binlog_events import EventType
from databus.relay.sources.mysql.statements import Statement, StatementDialect, effects_of
from databus.relay.sources.mysql.statements.token_reader import TableName
from databus.relay.sources.mysql.tables import changed_tables
from databus.relay.sources.mysql.tables.cascades import is_logged


@dataclass(slots=True)
class GroupWithoutScn:
    """A group that has no scn, while it is read.

    ``gtid`` is as the server writes it.  ``name`` and ``why`` are for messages.  ``tables`` are
    its captured tables by id.  ``prepared``: the tables that an XA transaction changes, and why.

    Owner: the decoder.
    """

    gtid: str
    name: str
    why: str
    tables: dict[int, TableName] = field(default_factory=dict)
    prepared: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SuspendingGroup:
    """A group that has suspended a table, and its location in the server's binlog."""

    gtid: str
    file: str
    offset: int


class GroupsWithoutScn(XaGroups):
    """Groups that are examined and make no window; ``BinlogDecoder`` is the whole.

    Invariants:
        I1. An examined group packs no frame and advances no scn.
        I2. ``suspended_by`` is the last group without an scn that has suspended a table.

    Owner: as BinlogDecoder.
    """

    dialect: StatementDialect
    domain_id: int
    cursor: EventCursor
    lookahead_request: LookaheadRequest

    def __init__(self) -> None:
        self.suspended_by: SuspendingGroup | None = None
        self._without_scn: tuple[tuple[int, int, int], GroupWithoutScn] | None = None

    def _described(self, group: Group) -> GroupWithoutScn:
        """The name of an examined group, and why it has no scn: here, one of another domain."""
        gtid = self.txid(group)
        why = (
            f"the relay follows gtid_domain_id {self.domain_id} alone (option domain_id): let the "
            "sessions that change captured tables use it"
        )
        return GroupWithoutScn(gtid, f"GTID {gtid}", why)

    def _was_examined(self, group: Group) -> None:
        """End an examined group: it need not be read again."""
        self.progress.foreign.note((group.domain_id, group.server_id), group.scn)

    def _gtid_list(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        progress = self.progress
        is_newest = progress.last_seq_no >= progress.resolved
        for missed in progress.foreign.unread(read_gtid_list(body), is_newest=is_newest):
            why = f"groups {missed} of another domain are older than the readable binlog"
            self.suspend_captured(f"{self.cursor.where(header)}: {why}")
        return True

    @property
    def gtid(self) -> str:
        """The GTID of the open group; "" if there is none, or if it is skipped."""
        if self.group is None or not (self.group.wanted or self.group.is_examined):
            return ""
        return self.txid(self.group) if self.group.wanted else self._examined().gtid

    def _examined(self) -> GroupWithoutScn:
        group = self.group
        assert group is not None
        identity = (group.domain_id, group.server_id, group.scn)
        if self._without_scn is None or self._without_scn[0] != identity:
            self._without_scn = identity, self._described(group)
        return self._without_scn[1]

    def _suspend(self, source: str, why: str, *, rows_remain: bool = False) -> None:
        group = self.group
        if group is None or not group.is_examined:
            return self._suspend_table(source, why, rows_remain=rows_remain)
        found = self._examined()
        if group.prepares:
            found.prepared.setdefault(source, why)
            return None
        self.suspended_by = SuspendingGroup(found.gtid, self.cursor.file, self.progress.group_begin)
        return self._suspend_table(
            source, f"{found.name} {why}; {found.why}", rows_remain=rows_remain
        )

    # -- its events

    def _look_ahead(
        self, statement: Statement | None = None, *, with_knowledge: bool = False
    ) -> bool:
        """Request what the event's statement needs; returns False, as ``feed`` does then."""
        self.lookahead_request = LookaheadRequest(
            is_for_statement=True,
            with_knowledge=with_knowledge,
            statement=None if with_knowledge else statement,
        )
        return False

    def _examine_statement(self, statement: Statement, fresh: bool) -> bool:
        """Suspend the captured tables that a statement changes; False as ``feed`` returns it."""
        captured, left = self._captured(), {}
        found = effects_of(statement, self.dialect, captured)
        converts = not found.converted.keys().isdisjoint(captured)
        if not fresh and (found.needs_knowledge or converts):
            return self._look_ahead(statement, with_knowledge=found.needs_knowledge)
        if found.needs_knowledge:
            found = effects_of(statement, self.dialect, captured, self.known.knowledge())
        elif converts:
            left = {schema.source: schema for schema in self.known.left_by(statement)}
        for source in changed_tables.sources_of(found.emptied, self.settings):
            self._suspend(source, f"empties it by {statement}")
        for change in changed_tables.changed_unseen(
            found,
            captured,
            self.announced.schemas(),
            self.announced.keys(),
            left,
            self.known.dropped,
        ):
            why = f"changes it by {statement}: {change.why}"
            self._suspend(change.source, why, rows_remain=change.rows_remain)
        if found.defined:
            altered = (name for name in captured if statement.may_change(*name))
            for source in changed_tables.sources_of(altered, self.settings):
                self.announced.doubt(source)
        self._note_invisible(found, captured)
        return True

    def _examine_map(self, body: memoryview) -> None:
        table_id, schema, table = binlog_events.table_map_names(body)
        if self.known.has(table_id, body):
            return
        if self.settings.captures(schema, table) and not self.known.is_sequence(body):
            self._examined().tables[table_id] = (schema, table)
        else:
            self.known.put(table_id, bytes(body), None)

    def _examine_rows(self, kind: int, body: memoryview) -> None:
        """Suspend the table of a rows event of the plain type ``kind``.

        Raises:
            ValueError: no table map came before.
        """
        table_id = int.from_bytes(body[0:6], "little")
        table = self._examined().tables.get(table_id) or self.known.name_of(table_id)
        if table is None:
            raise ValueError(f"rows of table {table_id} without its map")
        changed, cascades = {table}, self.known.cascades
        if kind != EventType.WRITE_ROWS and not is_logged(int.from_bytes(body[6:8], "little")):
            for key in cascades.of(table):
                if key.updates if kind == EventType.UPDATE_ROWS else key.deletes:
                    changed.update(cascades.reached(key))
        for source in changed_tables.sources_of(changed, self.settings):
            self._suspend(source, f"changes rows of {'.'.join(table)}")

    # -- its XA transactions

    def _xa_prepare(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        group = self.group
        if group is None or not group.is_examined:
            return super()._xa_prepare(header, body, fresh)
        xid, changed = read_prepare(body), self._examined().prepared
        group.flags &= ~binlog_events.GtidFlag.PREPARED_XA
        if xid is None:
            for source, why in changed.items():
                self._suspend(source, why)
        else:
            self._hold(xid, self.progress.resolved, frozenset(changed))
        self._end_group()
        return True

    def _hold(self, xid: Xid, scn: int, changed: frozenset[str]) -> None:
        """Store its tables until it is committed; a restart needs the binlog after ``scn``."""
        self.prepared.store_without_rows(xid, scn, changed)

    def _complete(self, statement: str) -> bool:
        completion, group = read_completion(statement), self.group
        if completion is None or group is None or not group.is_examined:
            return super()._complete(statement)
        commits = f"commits XA transaction {xid_text(completion.xid)}"
        if completion.commits and not self.prepared.holds(completion.xid):
            self.suspend_captured(f"{commits}, prepared before the binlog that could be read")
        elif completion.commits:
            packed = self.prepared.source_ids(completion.xid)
            rowless = self.prepared.lacks_rows_of(completion.xid) - self.suspended.left_out
            for name in self._captured():
                source = join_source(*name)
                if source in rowless or source_id(source) in packed:
                    self._suspend(source, f"{commits}, which changed it")
        self.prepared.drop(completion.xid)
        self._end_group()
        return True
