"""Decodes binlog events into windows of frames: a state machine without any I/O.

The events of one GTID group of the chosen domain become one window.  Groups of other domains
are counted, and suspend the captured tables that they change (``groups_without_scn.py``).
``BinlogDecoder.feed`` takes one event after the other; ``take`` returns the packed frames.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import replace

from databus.common.errors import FormatError, SourcePositionLost, UnsupportedChange
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import end_of_window
from databus.common.schema.source_names import join_source
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.announced_schemas import AnnouncedSchemas, NewSchemas
from databus.relay.sources.mysql.binlog import open_group
from databus.relay.sources.mysql.binlog.event_cursor import EventCursor
from databus.relay.sources.mysql.binlog.group_progress import GroupProgress
from databus.relay.sources.mysql.binlog.groups_without_scn import GroupsWithoutScn
from databus.relay.sources.mysql.binlog.lookahead_request import LookaheadRequest
from databus.relay.sources.mysql.binlog.open_group import PART_BYTES as PART_BYTES
from databus.relay.sources.mysql.binlog.savepoints import Savepoints, undone
from databus.relay.sources.mysql.binlog.xa_transactions import PreparedTransactions
from databus.relay.sources.mysql.gtid.mysql_lineage import (
    GroupLocation,
    LineageMark,
    MySqlResumeState,
)
from databus.relay.sources.mysql.kernels.kernel_cells import GROUPS_MARIADB
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.binlog_events import EventType, GtidFlag
from databus.relay.sources.mysql.protocol.compressed_events import (
    PLAIN_ROWS,
    PlainRows,
    plain_query,
)
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.rows.charsets import Charsets
from databus.relay.sources.mysql.rows.uncertain_table import TableUncertain
from databus.relay.sources.mysql.statements import Statement, StatementDialect, effects_of
from databus.relay.sources.mysql.statements.logged_statements import logged_statement
from databus.relay.sources.mysql.tables import changed_tables
from databus.relay.sources.mysql.tables.known_tables import KnownTables
from databus.relay.sources.mysql.tables.mapped_table import CatalogueDiffers
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue
from databus.relay.sources.suspended_tables import SuspendedTables

_NO_REQUEST = LookaheadRequest()
_WITHIN = ("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE SAVEPOINT", "XA ")
"""Statements that begin, end or divide a transaction and change no table."""


class BinlogDecoder(GroupsWithoutScn):
    """The decoder's state between two events.

    Invariants:
        I1. An open window smaller than PART_BYTES is never given out: a group that a server
            crash cut off is discarded, unless it was larger.
        I2. Every event's checksum was verified before its content was used.
        I3. Rows of a prepared XA transaction come at the position of its commit.
        I4. No event after the transaction ``progress.expected`` is read unless it is the known one.

    ``groups_in_kernel`` is the kind of GTIDs whose groups the kernel begins and ends.
    While ``prepared.is_replayed``, ``replay`` must be called before the next event.  The events of
    ``cursor.payload`` must be fed before the next one of the stream, and then it be set to None.

    Owner: the task that reads the stream.
    Raises: FormatError for bytes that are no events; UnsupportedChange for events that cannot
        be converted; SourcePositionLost if the domain's numbers decrease.
    """

    groups_in_kernel = GROUPS_MARIADB

    textual = binlog_events.TEXT_OF_MARIADB
    is_mysql = False

    def __init__(
        self,
        settings: MySqlSettings,
        charsets: Charsets,
        catalogue: Catalogue,
        domain_id: int,
        after_scn: int,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.domain_id = domain_id
        self.progress = GroupProgress(after_scn)
        self.cursor = EventCursor()
        self.group: open_group.Group | None = None
        self.dialect = StatementDialect(is_mysql=self.is_mysql)
        self._charsets = charsets
        self.known = KnownTables(settings, charsets, catalogue, self.textual)
        self.suspended = SuspendedTables({})
        self.out = open_group.FrameBuffer()
        self.prepared = PreparedTransactions()
        self.savepoints = Savepoints()
        self.announced = AnnouncedSchemas()
        self._new_schemas = NewSchemas()
        self.lookahead_request = _NO_REQUEST
        self._handlers: dict[int, Callable[[binlog_events.Header, memoryview, bool], bool]] = {
            EventType.GTID: self._gtid,
            EventType.GTID_LIST: self._gtid_list,
            EventType.TABLE_MAP: self._table_map,
            EventType.QUERY: self._query,
            EventType.XID: self._xid,
            EventType.XA_PREPARE: self._xa_prepare,
            EventType.ROTATE: self._rotate,
            EventType.STOP: self._stop,
            EventType.FORMAT_DESCRIPTION: self._format,
            EventType.HEARTBEAT: self._heartbeat,
            EventType.HEARTBEAT_V2: self._heartbeat,
            EventType.INCIDENT: self._incident,
            EventType.QUERY_COMPRESSED: self._packed_query,
            EventType.EXECUTE_LOAD_QUERY: self._load_query,
            **dict.fromkeys(PLAIN_ROWS, self._packed_rows),
        }

    # -- packed frames

    @property
    def resolved(self) -> int:
        """See ``GroupProgress``."""
        return self.progress.resolved

    @property
    def pending_bytes(self) -> int:
        """The number of bytes that ``take`` would return."""
        out = self.out
        if out.open_bytes < PART_BYTES or (self.group and self.group.prepares):
            return out.window_start
        return out.fill

    def take(self) -> tuple[bytes, tuple[SourceSchema, ...]]:
        """The frames that may be sent on, and the schemas that no earlier frame used."""
        size = self.pending_bytes
        return self.out.take(size), self._new_schemas.take()

    def resume_state(self) -> MySqlResumeState:
        """The resume state after all frames that ``take`` has returned."""
        progress, known = self.progress, self.known
        return MySqlResumeState(
            progress.resolved,
            progress.mark,
            self.prepared.oldest_scn,
            progress.ends,
            dict(self.suspended.suspensions),
            known.inferred.encode(),
            max(progress.resolved, known.inferred.since_scn),
            self.announced.encode(),
            location=progress.mark_location,
            dropped=known.dropped.names,
            foreign=progress.foreign.encode(),
            invisible=tuple(sorted(known.invisible)),
            cascades=known.cascades.encode(),
        )

    # -- one event

    def feed(self, event: memoryview, *, fresh: bool = False) -> bool:
        """Decode one whole event, including its header.

        Returns False if it needs the result of ``lookahead_request``, or of the same one without
        ``statement`` while ``known.inferred.is_needed``.  Then set ``known.lookahead`` to it and
        feed the same event again with ``fresh``.
        """
        header, cursor = binlog_events.read_header(event), self.cursor
        where = cursor.where(header)
        if header.length != len(event):
            raise FormatError(f"{where}: an event of {len(event)} bytes has length {header.length}")
        body = binlog_events.checked_body(header, event, cursor.has_checksum, where)
        handler = self._handlers.get(header.type)
        moves = header.is_in_file and cursor.payload is None
        try:
            done = handler(header, body, fresh) if handler else self._other(header, body)
        except (IndexError, ValueError, struct.error) as error:
            raise FormatError(
                f"{where}: an event of type {header.type} is damaged: {error}"
            ) from error
        if not done:
            self.lookahead_request = replace(
                self.lookahead_request,
                file=cursor.file,
                offset=header.end_after(cursor.offset) if moves else cursor.offset,
                server_offset=cursor.server_offset,
                gtid=self.gtid,
            )
            return False
        self.lookahead_request = _NO_REQUEST
        if moves:
            cursor.pass_event(header)
        return True

    # -- compressed events

    def _packed_query(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        return self._query(header, plain_query(body, self.cursor.where(header)), fresh)

    def _packed_rows(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        group = self.group
        if group is None or self.known.leaves_out(int.from_bytes(body[:6], "little")):
            return True
        if group.wanted:
            self.cursor.payload = PlainRows(header, body, self.cursor.where(header))
        elif group.is_examined:
            self._examine_rows(PLAIN_ROWS[EventType(header.type)], body)
        return True

    # -- groups

    def txid(self, group: open_group.Group) -> str:
        """The whole GTID of a group."""
        return f"{group.domain_id}-{group.server_id}-{group.scn}"

    def _gtid(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        gtid, progress = binlog_events.read_gtid(body), self.progress
        if self.group is not None:
            self._forget_group(f"{self.cursor.where(header)}: a new group begins")
        ours = gtid.domain_id == self.domain_id
        writer, commit_us = (gtid.domain_id, header.server_id), header.timestamp_s * 1_000_000
        is_xa = bool(gtid.flags & GtidFlag.PREPARED_XA)
        if ours and progress.expected is not None:
            mark = LineageMark(gtid.seq_no, header.server_id, commit_us)
            progress.recognise(mark, self.cursor.where(header))
        if ours and gtid.seq_no <= progress.last_seq_no:
            raise SourcePositionLost(
                f"{self.cursor.where(header)}: GTID {gtid.seq_no} of domain {self.domain_id} comes "
                f"after {progress.last_seq_no}; set gtid_strict_mode = ON on the server"
            )
        progress.group_begin = self.cursor.begin_of(header)
        self.group = open_group.Group(
            gtid.seq_no,
            gtid.domain_id,
            header.server_id,
            commit_us,
            gtid.flags,
            ours and (gtid.seq_no > progress.resolved or is_xa),
            is_examined=not ours and (gtid.seq_no > progress.foreign.last(writer) or is_xa),
        )
        if ours:
            progress.last_seq_no = gtid.seq_no
        else:
            progress.foreign.latest = writer
            progress.foreign_groups += 1
        return True

    def _end_group(self) -> None:
        group = self.group
        assert group is not None
        if group.wanted:
            if group.seq:
                self.out.append(
                    end_of_window(
                        group.scn, group.seq, group.commit_us, group.event_count, self.txid(group)
                    )
                )
            else:
                self.progress.other_groups += 1
            self._passed(group)
        elif group.is_examined:
            self._was_examined(group)
        self.group = None
        self.out.end_window()

    @property
    def kernel_server(self) -> tuple[int, int, int]:
        """The MySQL server whose groups the kernel reads: its uuid in two words, its first scn."""
        return 0, 0, 0

    def came_to(self, resolved: int, last_seq_no: int, before: int) -> None:
        """The kernel has begun groups, the last of them after ``before``, or ended some."""
        self.progress.resolved, self.progress.last_seq_no = resolved, last_seq_no

    def _passed(self, group: open_group.Group) -> None:
        if group.scn > self.progress.resolved:
            self.progress.resolved = group.scn
            self.came_behind(LineageMark(group.scn, group.server_id, group.commit_us))

    def came_behind(self, mark: LineageMark) -> None:
        """The group that began at ``group_begin`` has ended; it is the domain's last so far."""
        progress = self.progress
        progress.mark = mark
        if not self.is_mysql:
            progress.mark_location = GroupLocation(
                mark.scn, mark.server_id, self.cursor.file, progress.group_begin
            )

    def _forget_group(self, why: str) -> None:
        """Discard a group that the server rolled back after a crash."""
        group = self.group
        assert group is not None
        if self.out.is_partly_sent:
            raise SourcePositionLost(
                f"{why} before GTID {self.txid(group)} has ended, of which "
                f"{group.event_count} events were already sent on"
            )
        self.out.fill = self.out.window_start
        self.prepared.forget_open()
        if group.domain_id == self.domain_id:
            self.progress.last_seq_no = group.scn - 1
        self.group = None

    def _xid(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        if self.group is not None:
            self._end_group()
        return True

    # -- statements

    def _query(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        group = self.group
        if group is None:
            return True
        announced = logged_statement(header, body, self._charsets)
        statement = announced.text
        self._pass(group, announced)
        if not fresh:  # The catalogue that was read for it has them behind it.
            self.known.pass_keys(announced, self.dialect)
        if self._complete(statement):
            return True
        word = statement.strip().upper()
        if not group.wanted:
            is_change = group.is_examined and not word.startswith(_WITHIN)
            if is_change and not self._examine_statement(announced, fresh):
                return False
            if group.standalone or word in ("COMMIT", "ROLLBACK"):
                self._end_group()
            return True
        if group.standalone:
            if not self._take_effects(announced, fresh):
                return False
            self._end_group()
            return True
        if word == "COMMIT":
            self._end_group()
        elif word == "ROLLBACK" or word.startswith("ROLLBACK TO"):
            if group.event_count:
                if not fresh:
                    return self._look_ahead()
                self._roll_back(group, statement)
            if word == "ROLLBACK":
                self._end_group()
        elif word.startswith("SAVEPOINT"):
            self.savepoints.set(statement, group.scn, group.seq)
        elif word != "BEGIN" and not word.startswith(("RELEASE SAVEPOINT", "XA ")):
            return self._take_effects(announced, fresh)
        return True

    def _load_query(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        return self._query(header, binlog_events.load_query(body), fresh)

    def _roll_back(self, group: open_group.Group, statement: str) -> None:
        """Remove the undone rows of transactional tables; rows of other tables stay."""
        since = self.savepoints.undone_from(statement, group.scn)
        sources, lookahead = self.known.read_sources, self.known.lookahead
        left, gone, suspended = undone(self.out.cut_open(), group.seq, since, sources, lookahead)
        self.out.append(left)
        group.seq, group.event_count = group.seq - gone, group.event_count - gone
        for source in suspended:
            self._suspend_table(
                source, f"GTID {self.txid(group)}: {statement!r} undoes unknown rows"
            )

    def _take_effects(self, statement: Statement, fresh: bool) -> bool:
        """Turn a statement's effects on captured tables into events, or suspend the tables."""
        group = self.group
        assert group is not None
        captured = self._captured()
        found = effects_of(statement, self.dialect, captured)
        if not fresh and (found.needs_knowledge or (found.defined and group.standalone)):
            return self._look_ahead(statement, with_knowledge=found.needs_knowledge)
        if found.needs_knowledge:
            found = effects_of(statement, self.dialect, captured, self.known.knowledge())
        for source in changed_tables.sources_of(found.emptied, self.settings):
            self._truncate(source)
            self.announced.forget_schema(source)
        before, keys = self.announced.schemas(), self.announced.keys()
        left = self._announce_changes(statement) if found.defined and group.standalone else {}
        for change in changed_tables.changed_unseen(
            found, self._captured(), before, keys, left, self.known.dropped
        ):
            why = f"GTID {self.txid(group)}, {statement}: {change.why}"
            self._suspend_table(change.source, why, rows_remain=change.rows_remain)
        self._note_invisible(found, self._captured())
        return True

    def _pass(self, group: open_group.Group, statement: Statement) -> None:
        """Pass a statement to the inferred columns, unless they have it from an earlier read."""
        ours = group.domain_id == self.domain_id
        if (group.scn if ours else self.progress.last_scn + 1) > self.known.inferred.since_scn:
            self.known.passed(statement)

    def _truncate(self, source: str) -> None:
        """Add the event that a table was emptied.

        Its schema is the announced one, so that a dropped table has one too.  A suspended table
        resumes, because its content is known.
        """
        group = self.group
        assert group is not None
        fingerprint = self.announced.get(source)
        if self.suspended.leaves_out(source, group.scn):
            self.suspended.resume_emptied(source)
            self.known.forget_maps()
        if fingerprint is None:
            return
        if (schema := self.announced.schema(source)) is not None:
            self._new_schemas.use(schema, fingerprint)
        self.out.append(open_group.truncation(source, fingerprint, group))
        group.seq += 1
        group.event_count += 1

    def _announce_changes(self, statement: Statement) -> dict[str, SourceSchema]:
        """A schema-change frame for every table that a statement altered, even suspended ones.

        Returns the definitions that are certain after it.
        """
        group = self.group
        assert group is not None
        certain = {schema.source: schema for schema in self.known.left_by(statement)}
        for schema in certain.values():
            if not self.announced.is_current(schema):
                self._use(schema)
                self.out.append(schema.change_frame(group.scn, group.seq, group.commit_us))
                group.seq += 1
        return certain

    # -- rows

    def _table_map(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        group = self.group
        if group is not None and group.is_examined:
            self._examine_map(body)
        if group is None or not group.wanted:
            return True
        table_id, schema, table = binlog_events.table_map_names(body)
        if self.known.has(table_id, body):
            return True
        mapped = None
        source = join_source(schema, table)
        if source in self.known.invisible:
            self.suspend_invisible({})  # What it had before this row is not known.
        elif self.settings.captures(schema, table) and not self.suspended.leaves_out(
            source, group.scn
        ):
            try:
                mapped = self.known.resolve(body, fresh=fresh)
            except CatalogueDiffers:
                return False
            except UnsupportedChange as error:
                if not self.known.is_sequence(body):
                    self._suspend_table(source, error.message)
            else:
                known_by = self.announced.key(source)
                self._use(mapped.schema)
                if why := changed_tables.changed_key(known_by, mapped.schema):
                    self._suspend_table(source, why)
                    mapped = None
        self.known.put(table_id, bytes(body), mapped)
        return True

    def _use(self, schema: SourceSchema) -> None:
        previous = self.announced.get(schema.source)
        if previous is not None and not self.announced.is_current(schema):
            previous = 0  # The same definition is announced again, too, if it was in doubt.
        self._new_schemas.use(schema, previous)
        self.announced.put(schema)

    def _rows(self, header: binlog_events.Header, body: memoryview) -> None:
        group = self.group
        if group is None or not (group.wanted or group.is_examined):
            return
        kind, start = binlog_events.rows_event(header.type, body)
        if group.is_examined:
            return self._examine_rows(kind, body)
        table_id = int.from_bytes(body[0:6], "little")
        if table_id not in self.known.maps:
            raise FormatError(
                f"{self.cursor.where(header)}: rows of table {table_id} without its map"
            )
        mapped = self.known.maps[table_id]
        if kind != EventType.WRITE_ROWS and not self.out.rows_done:
            self._suspend_children(header, table_id, body)
        if mapped is None:
            return
        schema = mapped.schema
        update = kind == EventType.UPDATE_ROWS
        partial = header.type == EventType.PARTIAL_UPDATE_ROWS
        found = mapped.rows(body, start, update=update, partial=partial)
        rows = itertools.islice(found, self.out.rows_done, None)
        self.out.rows_done = 0
        try:
            for op, key, before, after in mapped.changes(rows, kind):
                self._event(op, schema, key, before, after)
        except TableUncertain as error:
            self._suspend_table(schema.source, error.message)

    def _event(
        self, op: Op, schema: SourceSchema, key: bytes, before: bytes | None, after: bytes | None
    ) -> None:
        group = self.group
        assert group is not None
        self.out.append(open_group.row_change(op, schema, group, key, before, after))
        group.seq += 1
        group.event_count += 1

    # -- the rest

    def _rotate(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        if self.group is not None:
            self._forget_group(f"{self.cursor.where(header)}: the file ends")
        if not self.cursor.rotate(header, body):
            self.suspend_crashed()
        return True

    def _stop(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        self.cursor.is_stopped = True
        return True

    def _format(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        if self.group is not None:
            self._forget_group(f"{self.cursor.where(header)}: a file begins")
        self.cursor.checksums = body[len(body) - 1] == 1
        self.known.begin_file(body)
        return True

    def _heartbeat(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        return True

    def _incident(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        raise SourcePositionLost(
            f"{self.cursor.where(header)}: the server reports that changes are missing in its "
            "binlog"
        )

    def _other(self, header: binlog_events.Header, body: memoryview) -> bool:
        if header.type in binlog_events.ROWS_EVENTS:
            self._rows(header, body)
        elif header.type not in binlog_events.PASSED_OVER and (
            header.type in binlog_events.OTHER_ROWS_EVENTS or not header.flags & 0x80
        ):
            self._unknown(header)
        return True

    def _unknown(self, header: binlog_events.Header) -> None:
        """Suspend all tables that an event of an unknown type may change."""
        why = f"{self.cursor.where(header)}: an event of type {header.type}, which is unknown"
        if self.group is None:
            raise UnsupportedChange(why)
        if self.group.wanted or self.group.is_examined:
            self.suspend_captured(why)
