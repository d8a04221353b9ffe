"""Decodes binlog events into windows of frames: a state machine without any I/O.

The events of one GTID group of the chosen domain become one window.  Groups of other domains
are counted, and suspend the captured tables that they change (``groups_without_scn.py``).
``BinlogDecoder.feed`` takes one event after the other; ``take`` returns the packed frames.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable

from databus.common.errors import FormatError, SourcePositionLost, UnsupportedChange
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import end_of_window
from databus.common.schema.source_names import join_source
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.announced_schemas import AnnouncedSchemas
from databus.relay.sources.mysql.binlog import open_group
from databus.relay.sources.mysql.binlog.groups_without_scn import GroupsWithoutScn
from databus.relay.sources.mysql.binlog.open_group import PART_BYTES as PART_BYTES
from databus.relay.sources.mysql.binlog.savepoints import Savepoints, undone
from databus.relay.sources.mysql.binlog.xa_transactions import PreparedTransactions
from databus.relay.sources.mysql.gtid.foreign_gtids import ForeignGtids
from databus.relay.sources.mysql.gtid.mysql_lineage import (
    GroupLocation,
    LineageMark,
    MySqlResumeState,
    require_same,
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
from databus.relay.sources.mysql.protocol.transaction_payload import Payload
from databus.relay.sources.mysql.rows.charsets import Charsets
from databus.relay.sources.mysql.rows.uncertain_table import TableUncertain
from databus.relay.sources.mysql.statements import Statement, StatementDialect, effects_of
from databus.relay.sources.mysql.statements.logged_statements import logged_statement
from databus.relay.sources.mysql.tables import changed_tables
from databus.relay.sources.mysql.tables.known_tables import KnownTables
from databus.relay.sources.mysql.tables.mapped_table import CatalogueDiffers
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue
from databus.relay.sources.suspended_tables import SuspendedTables

_WITHIN = ("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE SAVEPOINT", "XA ")
"""Statements that begin, end or divide a transaction and change no table."""


class BinlogDecoder(GroupsWithoutScn):
    """The decoder's state between two events.

    Invariants:
        I1. ``resolved`` is the scn of the last finished group of the domain, and no group
            at or below it is still to come.
        I2. ``out`` holds whole windows up to its ``window_start``; from there on the open one.
        I3. An open window smaller than PART_BYTES is never given out: a group that a server
            crash cut off is discarded, unless it was larger.
        I4. Every event's checksum was verified before its content was used.
        I5. Rows of a prepared XA transaction come at the position of its commit.
        I6. No event after the transaction ``expected`` is read unless it is the known one.

    ``groups_in_kernel`` is the kind of GTIDs whose groups the kernel begins and ends.
    With ``replaying``, ``replay`` must be called before the next event.  With ``payload``, its
    events must be fed before the next one, and then ``end_payload`` be called.

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
        self.foreign = ForeignGtids()
        self.resolved = after_scn
        self.file = ""
        self.offset = self.server_offset = 0
        self.checksums = False
        self.group: open_group.Group | None = None
        self.foreign_groups = 0
        self.other_groups = 0
        self.dialect = StatementDialect(is_mysql=self.is_mysql)
        self._charsets = charsets
        self.known = KnownTables(settings, charsets, catalogue, self.textual)
        self.last_seq_no = self.begins_after = 0
        self.ends: tuple[int, ...] = ()
        self.suspended = SuspendedTables({})
        self.looks_from = 0
        self.out = open_group.FrameBuffer()
        self.sent_part = False
        self.rows_done = 0
        self.expected: LineageMark | None = None
        self.mark: LineageMark | None = None
        self.group_begin = 0
        self.mark_location: GroupLocation | None = None
        self.prepared = PreparedTransactions()
        self.savepoints = Savepoints()
        self.replaying = False
        self.payload: Payload | PlainRows | None = None
        self._has_checksums = False
        self.announced = AnnouncedSchemas()
        self.looks_ahead = self.wants_knowledge = False
        self.looks_for: Statement | None = None
        self._used: set[int] = set()
        self._new_schemas: list[SourceSchema] = []
        self._handlers: dict[int, Callable[[binlog_events.Header, memoryview, bool], bool]] = {
            EventType.GTID: self._gtid,
            EventType.GTID_LIST: self._gtid_list,
            EventType.TABLE_MAP: self._table_map,
            EventType.QUERY: self._query,
            EventType.XID: self._xid,
            EventType.XA_PREPARE: self._xa_prepare,
            EventType.ROTATE: self._rotate,
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
    def pending_bytes(self) -> int:
        """The number of bytes that ``take`` would return."""
        out = self.out
        if out.open_bytes < PART_BYTES or (self.group and self.group.prepares):
            return out.window_start
        return out.fill

    def take(self) -> tuple[bytes, tuple[SourceSchema, ...]]:
        """The frames that may be sent on, and the schemas that no earlier frame used."""
        size = self.pending_bytes
        if size > self.out.window_start:
            self.sent_part = True
        schemas, self._new_schemas = tuple(self._new_schemas), []
        return self.out.take(size), schemas

    def resume_state(self) -> MySqlResumeState:
        """The resume state after all frames that ``take`` has returned."""
        return MySqlResumeState(
            self.resolved,
            self.mark,
            self.prepared.oldest_scn,
            self.ends,
            dict(self.suspended.suspensions),
            self.known.inferred.encode(),
            max(self.resolved, self.known.inferred.since_scn),
            self.announced.encode(),
            location=self.mark_location,
            dropped=self.known.dropped.names,
            foreign=self.foreign.encode(),
            unmet=tuple(sorted(self.known.unmet)),
            cascades=self.known.cascades.encode(),
        )

    # -- one event

    def feed(self, event: memoryview, *, fresh: bool = False) -> bool:
        """Decode one whole event, including its header.

        Returns False if it needs the present catalogue.  Then set ``known.outlook`` and feed the
        same event again with ``fresh``.  While ``known.tracked.is_needed`` or ``looks_ahead``, the
        outlook must also cover the statements after ``looks_from`` in ``file``, as far as is
        needed to know the result of the statement ``looks_for``, if there is one.
        """
        header = binlog_events.read_header(event)
        if header.length != len(event):
            raise FormatError(
                f"{self._where(header)}: an event of {len(event)} bytes has length {header.length}"
            )
        body = binlog_events.checked_body(header, event, self.checksums, self._where(header))
        handler = self._handlers.get(header.type)
        in_payload = self.payload is not None
        try:
            done = handler(header, body, fresh) if handler else self._other(header, body)
        except (IndexError, ValueError, struct.error) as error:
            raise FormatError(
                f"{self._where(header)}: an event of type {header.type} is damaged: {error}"
            ) from error
        moves = header.is_in_file and not in_payload
        end = header.end_after(self.offset) if moves else self.offset
        if not done:
            self.looks_from = end
            return False
        self.looks_ahead, self.looks_for, self.wants_knowledge = False, None, False
        self.offset = end
        if moves and header.end_offset:
            self.server_offset = end
        return True

    def _where(self, header: binlog_events.Header) -> str:
        if self.payload is not None:
            return self.payload.where
        begin = header.end_after(self.offset) - header.length
        return f"binlog {self.file or '(start)'} at {begin}"

    # -- compressed events

    def _open_payload(self, payload: Payload | PlainRows) -> None:
        """Read a payload's events before the next one of the stream; they have no checksums."""
        self.payload = payload
        self._has_checksums, self.checksums = self.checksums, False

    def end_payload(self) -> None:
        """All events of the payload were read: continue with the stream's."""
        self.payload = None
        self.checksums = self._has_checksums

    def _packed_query(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        return self._query(header, plain_query(body, self._where(header)), fresh)

    def _packed_rows(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        group = self.group
        if group is None or self.known.leaves_out(int.from_bytes(body[:6], "little")):
            return True
        if group.wanted:
            self._open_payload(PlainRows(header, body, self._where(header)))
        elif group.is_examined:
            self._examine_rows(PLAIN_ROWS[EventType(header.type)], body)
        return True

    # -- groups

    def txid(self, group: open_group.Group) -> str:
        """The whole GTID of a group."""
        return f"{group.domain_id}-{group.server_id}-{group.scn}"

    def _gtid(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        gtid = binlog_events.read_gtid(body)
        if self.group is not None:
            self._forget_group(f"{self._where(header)}: a new group begins")
        ours = gtid.domain_id == self.domain_id
        writer = gtid.domain_id, header.server_id
        is_xa = bool(gtid.flags & GtidFlag.PREPARED_XA)
        if ours:
            self._recognise(gtid.seq_no, header)
        if ours and gtid.seq_no <= self.last_seq_no:
            raise SourcePositionLost(
                f"{self._where(header)}: GTID {gtid.seq_no} of domain {self.domain_id} comes "
                f"after {self.last_seq_no}; set gtid_strict_mode = ON on the server"
            )
        self.group_begin = header.end_after(self.offset) - header.length
        self.group = open_group.Group(
            gtid.seq_no,
            gtid.domain_id,
            header.server_id,
            header.timestamp_s * 1_000_000,
            gtid.flags,
            ours and (gtid.seq_no > self.resolved or is_xa),
            is_examined=not ours and (gtid.seq_no > self.foreign.last(writer) or is_xa),
        )
        if ours:
            self.last_seq_no = gtid.seq_no
        else:
            self.foreign.latest = writer
            self.foreign_groups += 1
        return True

    def _recognise(self, scn: int, header: binlog_events.Header, commit_us: int = 0) -> None:
        """Check that this server's history has the transaction ``expected``."""
        expected = self.expected
        if expected is None or scn < expected.scn:
            return
        found = LineageMark(scn, header.server_id, commit_us or header.timestamp_s * 1_000_000)
        require_same(found, expected, self._where(header))
        self.expected, self.mark = None, found

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
                self.other_groups += 1
            self._passed(group)
        elif group.is_examined:
            self._was_examined(group)
        self.group = None
        self.out.window_start = self.out.fill
        self.sent_part = False

    @property
    def kernel_server(self) -> tuple[int, int, int]:
        """The MySQL server whose groups the kernel reads: its uuid in two words, its first scn."""
        return 0, 0, 0

    def came_to(self, resolved: int, last_seq_no: int, before: int) -> None:
        """The kernel has begun groups, the last of them after ``before``, or ended some."""
        self.resolved, self.last_seq_no = resolved, last_seq_no

    def _passed(self, group: open_group.Group) -> None:
        if group.scn > self.resolved:
            self.resolved = group.scn
            self.came_behind(LineageMark(group.scn, group.server_id, group.commit_us))

    def came_behind(self, mark: LineageMark) -> None:
        """The group that began at ``group_begin`` has ended; it is the domain's last so far."""
        self.mark = mark
        if not self.is_mysql:
            self.mark_location = GroupLocation(
                mark.scn, mark.server_id, self.file, self.group_begin
            )

    def _forget_group(self, why: str) -> None:
        """Discard a group that the server rolled back after a crash."""
        group = self.group
        assert group is not None
        if self.sent_part:
            raise SourcePositionLost(
                f"{why} before GTID {self.txid(group)} has ended, of which "
                f"{group.event_count} events were already sent on"
            )
        self.out.fill = self.out.window_start
        self.prepared.forget_open()
        if group.domain_id == self.domain_id:
            self.last_seq_no = group.scn - 1
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
                self.looks_ahead = True
                if not fresh:
                    return False
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
            self.looks_ahead, self.wants_knowledge = True, found.needs_knowledge
            self.looks_for = None if found.needs_knowledge else statement
            return False
        if found.needs_knowledge:
            found = effects_of(statement, self.dialect, captured, self.known.knowledge())
        for source in changed_tables.sources_of(found.emptied, self.settings):
            self._truncate(source)
            self.announced.forget_schema(source)
        before = self.announced.schemas()
        left = self._announce_changes(statement) if found.defined and group.standalone else {}
        for change in changed_tables.changed_unseen(
            found, self._captured(), before, left, self.known.dropped
        ):
            why = f"GTID {self.txid(group)}, {statement}: {change.why}"
            self._suspend_table(change.source, why, keeps_rows=change.keeps_rows)
        self._note_unmet(found, self._captured())
        return True

    def _pass(self, group: open_group.Group, statement: Statement) -> None:
        """Pass a statement to the inferred columns, unless they have it from an earlier read."""
        came_to = max(self.last_seq_no, self.begins_after)
        ours = group.domain_id == self.domain_id
        if (group.scn if ours else came_to + 1) > self.known.inferred.since_scn:
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
            if self.announced.get(schema.source) != schema.fingerprint:
                self._use(schema)
                self.out.append(open_group.schema_change(schema, group))
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
        if source in self.known.unmet:
            self.meet([source])  # What it had before this row is not known.
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
                known_by = self.announced.schema(source)
                self._use(mapped.schema)
                if why := changed_tables.changed_key(known_by, mapped.schema):
                    self._suspend_table(source, why)
                    mapped = None
        self.known.put(table_id, bytes(body), mapped)
        return True

    def _use(self, schema: SourceSchema) -> None:
        returns = self.announced.get(schema.source) not in (None, schema.fingerprint)
        self.announced.put(schema)
        if returns or schema.fingerprint not in self._used:
            self._used.add(schema.fingerprint)
            self._new_schemas.append(schema)

    def _rows(self, header: binlog_events.Header, body: memoryview) -> None:
        group = self.group
        if group is None or not (group.wanted or group.is_examined):
            return
        kind, start = binlog_events.rows_event(header.type, body)
        if group.is_examined:
            return self._examine_rows(kind, body)
        table_id = int.from_bytes(body[0:6], "little")
        if table_id not in self.known.maps:
            raise FormatError(f"{self._where(header)}: rows of table {table_id} without its map")
        mapped = self.known.maps[table_id]
        if kind != EventType.WRITE_ROWS and not self.rows_done:
            self._suspend_children(header, table_id, body)
        if mapped is None:
            return
        schema = mapped.schema
        update = kind == EventType.UPDATE_ROWS
        partial = header.type == EventType.PARTIAL_UPDATE_ROWS
        found = mapped.rows(body, start, update=update, partial=partial)
        rows = itertools.islice(found, self.rows_done, None)
        self.rows_done = 0
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
            self._forget_group(f"{self._where(header)}: the file ends")
        self.file, self.offset = binlog_events.read_rotate(body)
        self.server_offset = self.offset
        return True

    def _format(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        if self.group is not None:
            self._forget_group(f"{self._where(header)}: a file begins")
        self.checksums = body[len(body) - 1] == 1
        self.known.begin_file(body)
        return True

    def _heartbeat(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        return True

    def _incident(self, header: binlog_events.Header, body: memoryview, fresh: bool) -> bool:
        raise SourcePositionLost(
            f"{self._where(header)}: the server reports that changes are missing in its binlog"
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
        why = f"{self._where(header)}: an event of type {header.type}, which is unknown"
        if self.group is None:
            raise UnsupportedChange(why)
        if self.group.wanted or self.group.is_examined:
            self.suspend_captured(why)
