"""DDL look-ahead: the statements between the stream's position and the end of the binlog.

The catalogue describes the present tables.  Whether a description is right at the stream's
position depends on the statements in between.  They are read over a separate connection, each
part of the binlog once.  So are table maps, as far as they are needed to know what a statement
has left.
"""

from __future__ import annotations

import logging

from databus.common.errors import SourceUnavailable
from databus.common.schema.source_names import join_source, split_source
from databus.relay.sources.mysql.binlog.lookahead_request import LookaheadRequest
from databus.relay.sources.mysql.gtid.binlog_locations import BinlogLocation
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.binlog_events import EventType
from databus.relay.sources.mysql.protocol.compressed_events import plain_query
from databus.relay.sources.mysql.protocol.mysql_connection import BinlogRequest, MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.protocol.packet_buffer import PacketBuffer
from databus.relay.sources.mysql.protocol.transaction_payload import Payload
from databus.relay.sources.mysql.statements import Statement
from databus.relay.sources.mysql.statements.logged_statements import logged_statement
from databus.relay.sources.mysql.statements.routine_catalogue import load_knowledge
from databus.relay.sources.mysql.tables.cascades import load_cascades
from databus.relay.sources.mysql.tables.inferred_columns import NOT_READ, LookaheadResult
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue, load_catalogue

_log = logging.getLogger(__name__)

_OTHER_SERVER_ID = 1 << 31
"""The look-ahead's server id: a server ends a reader's stream when another one uses its id."""
_SILENCE_S = 10.0
_HEARTBEAT_S = 1.0
_COMMITTED_WITHIN_S = 30
_LOOKS = 3
_NOTED = frozenset(
    {
        EventType.QUERY,
        EventType.QUERY_COMPRESSED,
        EventType.EXECUTE_LOAD_QUERY,
        EventType.TABLE_MAP,
        EventType.TRANSACTION_PAYLOAD,
    }
)


class DdlLookahead:
    """Reads ahead for one stream.

    Invariants:
        I1. ``_seen`` holds every statement that ends in ``(_since, _upto]`` and may change
            a definition; ``_maps`` of each captured table the first map with names in there,
            and the first behind each statement that can have changed it.
        I2. ``_begin`` is an offset at or before ``_upto`` in ``_file`` at which an event ends and
            from which the server can stream.

    Owner: the source; one call at a time, in a thread.
    """

    def __init__(self) -> None:
        self._since = self._upto = BinlogLocation(0, 0)
        self._file, self._begin, self._at = "", 0, self._upto
        self._checksums = False
        self._seen: list[tuple[BinlogLocation, Statement]] = []
        self._maps: list[tuple[BinlogLocation, str, bytes]] = []
        self._mapped: set[tuple[str, str]] = set()

    def look(
        self,
        connection: MySqlConnection,
        settings: MySqlSettings,
        request: LookaheadRequest,
    ) -> LookaheadResult:
        """The present catalogue, and the statements after the requested position.

        MySQL writes a transaction to the binlog before it commits.  Until then the catalogue is
        older, so this waits for the commit of ``request.gtid``.

        Raises:
            SourceUnavailable: the server does not answer, or does not commit the transaction.
        """
        here, gtid = BinlogLocation.of(request.file, request.offset), request.gtid
        if connection.is_mysql and gtid:
            waited = f"SELECT WAIT_FOR_EXECUTED_GTID_SET(%s, {_COMMITTED_WITHIN_S})"
            if str(connection.row(waited, (gtid,))[0]) != "0":
                raise SourceUnavailable(
                    f"{settings.host}:{settings.port} (database={settings.name}) has GTID {gtid} "
                    f"in its binlog, and has not committed it within {_COMMITTED_WITHIN_S} s"
                )
        for _ in range(_LOOKS):
            before = _end(connection)
            catalogue = load_catalogue(connection, settings)
            cascades = load_cascades(connection) if request.is_for_statement else None
            knowledge = load_knowledge(connection) if request.with_knowledge else NOT_READ
            after = _end(connection)
            statement = request.statement
            requested = _named(statement, catalogue) if statement is not None else None
            self._extend(settings, request, here, after, requested)
            if not any(location > before for location, _ in self._seen):
                break  # The binlog did not grow while the catalogue was read.
        ahead = tuple(statement for _, statement in self._seen)
        shown = self._shown() if requested is not None else {}
        is_present = not ahead and self._upto >= after
        return LookaheadResult(catalogue, ahead, shown, knowledge, cascades, is_present)

    def _shown(self) -> dict[str, bytes]:
        """The first maps of tables that no earlier statement can have changed."""
        found: dict[str, bytes] = {}
        for location, source, body in self._maps:
            change = self._first_change(source)
            if source not in found and (change is None or location < change):
                found[source] = body
        return found

    def _first_change(self, source: str) -> BinlogLocation | None:
        schema, name = split_source(source)
        changes = (
            location for location, statement in self._seen if statement.may_change(schema, name)
        )
        return next(changes, None)

    def _extend(
        self,
        settings: MySqlSettings,
        request: LookaheadRequest,
        here: BinlogLocation,
        end: BinlogLocation,
        requested: set[str] | None,
    ) -> None:
        if not self._since <= here <= self._upto:
            self._since = self._upto = here
            self._file, self._begin = request.file, request.server_offset
            for noted in (self._seen, self._maps, self._mapped):
                noted.clear()
        self._since = here
        self._seen = [noted for noted in self._seen if noted[0] > here]
        self._maps = [noted for noted in self._maps if noted[0] > here]
        if end > self._upto and not self._knows(requested):
            self._read(settings, end, requested)

    def _knows(self, requested: set[str] | None) -> bool:
        """Whether each requested table has a map, or a statement that can have changed it."""
        if requested is None:
            return False
        mapped = {source for _, source, _ in self._maps}
        return all(source in mapped or self._first_change(source) for source in requested)

    def _read(
        self, settings: MySqlSettings, end: BinlogLocation, requested: set[str] | None
    ) -> None:
        where = f"{settings.host}:{settings.port} (database={settings.name})"
        _log.info("database %s: looking ahead from %s to %s", settings.name, self._upto, end)
        self._at = BinlogLocation(self._upto.file_number, self._begin)
        connection = MySqlConnection(settings)
        try:
            self._checksums = connection.row("SELECT @@global.binlog_checksum")[0] == "CRC32"
            raw = connection.start_binlog(
                BinlogRequest(self._file, self._begin),
                settings.server_id ^ _OTHER_SERVER_ID,
                _HEARTBEAT_S,
            )
            raw.settimeout(_SILENCE_S)
            packets = PacketBuffer(where)
            while self._upto < end:
                try:
                    count = raw.recv_into(packets.room())
                except OSError as error:
                    raise SourceUnavailable(f"{where}: the look-ahead failed: {error}") from error
                if not count:
                    raise SourceUnavailable(f"{where} closed the connection")
                packets.received(count)
                while self._upto < end and (event := packets.next_event()) is not None:
                    noted = len(self._seen), len(self._maps)
                    if self._take(event, settings):
                        self._upto = end
                    packets.used()
                    if noted != (len(self._seen), len(self._maps)) and self._knows(requested):
                        return
        finally:
            connection.close()

    def _take(self, event: memoryview, settings: MySqlSettings) -> bool:
        """Read one event; returns whether it is a heartbeat: the server has no more events."""
        header = binlog_events.read_header(event)
        if header.type in (EventType.HEARTBEAT, EventType.HEARTBEAT_V2):
            return True
        if header.type == EventType.FORMAT_DESCRIPTION:
            self._checksums = binlog_events.read_checksum_algorithm(event) == 1
            return False
        where = f"binlog {self._file}, after {self._at.offset}"
        if header.type == EventType.ROTATE:
            body = binlog_events.checked_body(header, event, self._checksums, where)
            file, offset = binlog_events.read_rotate(body)
            # The first one is artificial, and names the requested position.
            if (location := BinlogLocation.of(file, offset)) > self._upto:
                self._file, self._begin = file, offset
                self._at = self._upto = location
            return False
        if not header.is_in_file:
            return False
        self._at = BinlogLocation(self._at.file_number, header.end_after(self._at.offset))
        if header.end_offset:
            self._begin = header.end_offset
        if self._at <= self._upto:
            return False
        self._upto = self._at
        if header.type in _NOTED:
            body = binlog_events.checked_body(header, event, self._checksums, where)
            self._note(header, body, where, settings)
        return False

    def _note(
        self, header: binlog_events.Header, body: memoryview, where: str, settings: MySqlSettings
    ) -> None:
        kind = header.type
        if kind == EventType.TABLE_MAP:
            self._note_map(body, settings)
        elif kind == EventType.TRANSACTION_PAYLOAD:
            payload = Payload(body, where)
            while payload.refill():
                while (event := payload.packets.next_event()) is not None:
                    header = binlog_events.read_header(event)
                    if header.type == EventType.TABLE_MAP:
                        self._note_map(
                            binlog_events.checked_body(header, event, False, where), settings
                        )
                    payload.packets.used()
        else:
            if kind == EventType.QUERY_COMPRESSED:
                body = plain_query(body, where)
            elif kind == EventType.EXECUTE_LOAD_QUERY:
                body = binlog_events.load_query(body)
            statement = logged_statement(header, body)
            if not statement.changes_nothing:
                self._seen.append((self._upto, statement))
                self._mapped = {name for name in self._mapped if not statement.may_change(*name)}

    def _note_map(self, body: memoryview, settings: MySqlSettings) -> None:
        _, schema, table = binlog_events.table_map_names(body)
        if (schema, table) in self._mapped:
            return
        self._mapped.add((schema, table))
        if settings.captures(schema, table) and binlog_events.names_columns(body):
            self._maps.append((self._upto, join_source(schema, table), bytes(body)))


def _named(statement: Statement, catalogue: Catalogue) -> set[str]:
    """The existing tables that a statement can have changed."""
    return {
        source
        for source, table in catalogue.items()
        if statement.may_change(table.schema, table.name)
    }


def _end(connection: MySqlConnection) -> BinlogLocation:
    """The end of the last event that the server has written."""
    is_new = connection.is_mysql and connection.is_at_least(8, 2)
    status = "BINARY LOG" if is_new else "MASTER"
    file, offset = connection.row(f"SHOW {status} STATUS")[:2]
    return BinlogLocation.of(str(file), int(offset))
