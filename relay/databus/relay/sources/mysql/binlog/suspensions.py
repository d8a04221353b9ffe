"""The part of the binlog decoder that suspends and resumes tables."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from databus.common.schema.source_names import join_source
from databus.relay.sources.announced_schemas import AnnouncedSchemas
from databus.relay.sources.mysql.binlog.group_progress import GroupProgress
from databus.relay.sources.mysql.binlog.open_group import Group
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.binlog_events import EventType
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.rows.uncertain_table import TableUncertain
from databus.relay.sources.mysql.statements import Effects
from databus.relay.sources.mysql.statements.token_reader import TableName
from databus.relay.sources.mysql.tables import changed_tables
from databus.relay.sources.mysql.tables.cascades import is_logged
from databus.relay.sources.mysql.tables.known_tables import KnownTables
from databus.relay.sources.mysql.tables.mapped_table import MappedTable
from databus.relay.sources.mysql.tables.mysql_tables import TRANSACTIONAL_ENGINES, Catalogue
from databus.relay.sources.suspended_tables import SuspendedTables

_log = logging.getLogger(__name__)

_INVISIBLE = "it took this name, with rows, while the relay's account could not see it"
_UNSEEN = "GRANT SELECT ON {} TO the relay's account, if there is such a table"


class Suspensions(ABC):
    """The tables that the stream cannot follow; ``BinlogDecoder`` is the whole.

    Owner: as BinlogDecoder.
    """

    settings: MySqlSettings
    known: KnownTables
    announced: AnnouncedSchemas
    suspended: SuspendedTables
    group: Group | None
    progress: GroupProgress

    @abstractmethod
    def txid(self, group: Group) -> str:
        """The whole GTID of a group."""

    def _captured(self) -> list[TableName]:
        return changed_tables.captured_names(self.settings, self.known.catalogue, self.announced)

    def suspend_captured(self, why: str) -> None:
        """Suspend every captured table: any of them may have changed."""
        for source in changed_tables.sources_of(self._captured(), self.settings):
            self._suspend(source, why)

    def _suspend(self, source: str, why: str, *, rows_remain: bool = False) -> None:
        self._suspend_table(source, why, rows_remain=rows_remain)

    def _suspend_table(self, source: str, why: str, *, rows_remain: bool = False) -> None:
        """Suspend this table; with ``rows_remain`` only until this transaction ends."""
        group = self.group
        scn = group.scn if group is not None and group.wanted else self.progress.resolved
        if source not in self.suspended.suspensions:
            _log.warning("database %s: %s is suspended: %s", self.settings.name, source, why)
        self.suspended.suspend(source, scn, why, rows_remain=rows_remain)
        self.known.pass_over(source)

    def _note_invisible(self, found: Effects, captured: Iterable[TableName]) -> None:
        """Note captured names that tables with rows took while the account cannot see them."""
        invisible = self.known.invisible
        for source in invisible.intersection(join_source(*name) for name in found.emptied):
            invisible.discard(source)
            self.suspended.wait_for(source, "")
        taken = set(found.replaced).difference(captured)
        invisible.update(changed_tables.sources_of(taken, self.settings))

    def suspend_invisible(self, seen: Mapping[str, bool]) -> None:
        """Suspend the tables of noted names; unseen ones wait for the right.

        ``seen``: the names that it sees, and whether that is a table.
        """
        for source in sorted(self.known.invisible):
            if seen.get(source, True):
                self._suspend_table(source, _INVISIBLE)
            self.suspended.wait_for(source, "" if source in seen else _UNSEEN.format(source))
        self.known.invisible.difference_update(seen)

    def suspend_unlogged(self, catalogue: Catalogue) -> None:
        """Suspend the tables whose content is not in the binlog."""
        for source, table in catalogue.items():
            if table.unlogged and source not in self.suspended.suspensions:
                _log.warning("%s: %s is suspended: %s", self.settings.name, source, table.unlogged)
                self.suspended.suspend(source, self.progress.resolved, table.unlogged)
                self.known.pass_over(source)

    def suspend_crashed(self) -> None:
        """Suspend the tables of engines that do not recover after a crash.

        The server ended without shutting down.  Rows of such a table that the binlog has may be
        lost, and it may have rows that the binlog lacks.
        """
        for source, table in self.known.catalogue.items():
            # The server writes to the binlog that it has emptied a MEMORY table.
            if table.engine not in TRANSACTIONAL_ENGINES and table.engine != "MEMORY":
                self._suspend_table(
                    source,
                    f"the server ended without shutting down, and a table of {table.engine} may "
                    f"since have other rows than the binlog; ALTER TABLE {source} ENGINE = InnoDB",
                )

    def resume_requested(self) -> None:
        """Between two groups, resume the suspended tables that were requested."""
        if self.suspended.has_requests and self.group is None:
            self.suspended.resume_requested()
            self.known.forget_maps()

    def _suspend_children(
        self, header: binlog_events.Header, table_id: int, body: memoryview
    ) -> None:
        """Suspend tables whose rows a foreign key changes: the binlog does not have that."""
        keys = self.known.cascades_of(table_id)
        if not keys or is_logged(int.from_bytes(body[6:8], "little")):
            return
        group, mapped = self.group, self.known.maps[table_id]
        assert group is not None
        is_update = binlog_events.rows_event(header.type, body)[0] == EventType.UPDATE_ROWS
        for key in keys:
            if not (key.updates if is_update else key.deletes):
                continue
            if is_update and mapped and not _changes_columns(header, body, mapped, key.columns):
                continue
            why = f"rows of {'.'.join(key.parent)} were changed, and the foreign key {key} changes"
            for child in changed_tables.sources_of(self.known.cascades.reached(key), self.settings):
                self._suspend_table(
                    child, f"GTID {self.txid(group)}: {why} its rows outside of the binlog"
                )


def _changes_columns(
    header: binlog_events.Header, body: memoryview, mapped: MappedTable, columns: Sequence[str]
) -> bool:
    """Whether one of the updated rows has, or may have, another value in one of these columns."""
    names = [column.column.name.lower() for column in mapped.columns]
    wanted = [names.index(column.lower()) for column in columns if column.lower() in names]
    if len(wanted) < len(columns) or not columns:
        return True
    _, start = binlog_events.rows_event(header.type, body)
    partial = header.type == binlog_events.EventType.PARTIAL_UPDATE_ROWS
    try:
        rows = mapped.rows(body, start, update=True, partial=partial)
        return any(before[index] != after[index] for before, after in rows for index in wanted)
    except TableUncertain:
        return True
