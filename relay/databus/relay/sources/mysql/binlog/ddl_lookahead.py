"""A look ahead in the binlog: which statements lie between the stream and the server's newest.

The catalogue says what tables are now.  Whether that holds where the stream is depends on the
statements in between, so these are read on a connection of their own, each piece once.  So are
the table maps, which say what a statement has left: only as far as they are needed for that.
"""

from __future__ import annotations

import logging

from databus.common.errors import SourceUnavailable
from databus.common.schema.source_names import join_source, split_source
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
from databus.relay.sources.mysql.tables.inferred_columns import LookaheadResult
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue, load_catalogue

_log = logging.getLogger(__name__)

_OTHER_SERVER_ID = 1 << 31
"""A server ends the stream of a reader when another one comes with its id."""
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
    """Reads ahead on behalf of one stream.

    Invariants:
        I1. ``_seen`` holds every statement that ends in ``(_since, _upto]`` and may change
            a definition; ``_maps`` of each captured table the first map with names in there,
            and the first behind each statement that can have changed it.
        I2. ``_begin`` is a place at or before ``_upto`` in ``_file`` that the server knows, where
            an event ends.

    Owner: the source; one question at a time, in a thread.
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
        file: str,
        offset: int,
        server_offset: int,
        gtid: str,
        statement: Statement | None = None,
        *,
        with_knowledge: bool = False,
    ) -> LookaheadResult:
        """The catalogue as it is now, and the statements behind a place in the binlog.

        ``server_offset`` is the last end position that the server named up to there; within a
        transaction MariaDB 11.4 names none.  ``gtid`` is the transaction at that place: what MySQL
        shows is older than its binlog until a transaction that is there already has been committed.
        With ``statement``, which ends there, only as far as is needed to know what it has left.
        ``with_knowledge`` asks for views, triggers and what else a change of rows reaches.

        Raises:
            SourceUnavailable: the server does not answer, or does not commit the transaction.
        """
        here = BinlogLocation.of(file, offset)
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
            after = _end(connection)
            asked = _named(statement, catalogue) if statement is not None else None
            self._extend(settings, here, file, server_offset, after, asked)
            if not any(place > before for place, _ in self._seen):
                break  # Nothing came in while the catalogue was read.
        ahead = tuple(statement for _, statement in self._seen)
        if asked is not None:
            return LookaheadResult(catalogue, ahead, self._shown())
        if with_knowledge:
            return LookaheadResult(catalogue, ahead, knowledge=load_knowledge(connection))
        return LookaheadResult(catalogue, ahead)

    def _shown(self) -> dict[str, bytes]:
        """The first maps of tables that no statement can have changed before."""
        found: dict[str, bytes] = {}
        for place, source, body in self._maps:
            change = self._first_change(source)
            if source not in found and (change is None or place < change):
                found[source] = body
        return found

    def _first_change(self, source: str) -> BinlogLocation | None:
        schema, name = split_source(source)
        places = (place for place, statement in self._seen if statement.may_change(schema, name))
        return next(places, None)

    def _extend(
        self,
        settings: MySqlSettings,
        here: BinlogLocation,
        file: str,
        server_offset: int,
        end: BinlogLocation,
        asked: set[str] | None,
    ) -> None:
        if not self._since <= here <= self._upto:
            self._since = self._upto = here
            self._file, self._begin = file, server_offset
            for noted in (self._seen, self._maps, self._mapped):
                noted.clear()
        self._since = here
        self._seen = [noted for noted in self._seen if noted[0] > here]
        self._maps = [noted for noted in self._maps if noted[0] > here]
        if end > self._upto and not self._knows(asked):
            self._read(settings, end, asked)

    def _knows(self, asked: set[str] | None) -> bool:
        """Whether it is settled of all that is asked for what they were, or that they changed."""
        if asked is None:
            return False
        mapped = {source for _, source, _ in self._maps}
        return all(source in mapped or self._first_change(source) for source in asked)

    def _read(self, settings: MySqlSettings, end: BinlogLocation, asked: set[str] | None) -> None:
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
                    raise SourceUnavailable(f"{where}: the look ahead failed: {error}") from error
                if not count:
                    raise SourceUnavailable(f"{where} closed the connection")
                packets.received(count)
                while self._upto < end and (event := packets.next_event()) is not None:
                    noted = len(self._seen), len(self._maps)
                    if self._take(event, settings):
                        self._upto = end
                    packets.used()
                    if noted != (len(self._seen), len(self._maps)) and self._knows(asked):
                        return
        finally:
            connection.close()

    def _take(self, event: memoryview, settings: MySqlSettings) -> bool:
        """Use one event; returns whether the server has nothing more, and waits."""
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
            # The first one is artificial, and names the place that was asked for.
            if (place := BinlogLocation.of(file, offset)) > self._upto:
                self._file, self._begin = file, offset
                self._at = self._upto = place
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
    """The tables that a statement can have changed, of those that are still there."""
    return {
        source
        for source, table in catalogue.items()
        if statement.may_change(table.schema, table.name)
    }


def _end(connection: MySqlConnection) -> BinlogLocation:
    """The place behind the last event that the server has written."""
    is_new = connection.is_mysql and connection.is_at_least(8, 2)
    status = "BINARY LOG" if is_new else "MASTER"
    file, offset = connection.row(f"SHOW {status} STATUS")[:2]
    return BinlogLocation.of(str(file), int(offset))
