"""A look ahead in the binlog: which statements lie between the stream and the server's newest.

The catalogue says what tables are now.  Whether that holds where the stream is depends on the
statements in between, so these are read on a connection of their own, each piece once.
"""

from __future__ import annotations

import logging

from databus.common.errors import SourceUnavailable
from databus.relay.sources.mysql import events
from databus.relay.sources.mysql.connection import BinlogRequest, Connection
from databus.relay.sources.mysql.events import EventType
from databus.relay.sources.mysql.packets import PacketBuffer
from databus.relay.sources.mysql.places import Place
from databus.relay.sources.mysql.settings import Settings
from databus.relay.sources.mysql.tables import load_catalogue
from databus.relay.sources.mysql.tracked import Outlook, Statement

_log = logging.getLogger(__name__)

_OTHER_SERVER_ID = 1 << 31
"""A server ends the stream of a reader when another one comes with its id."""
_SILENCE_S = 10.0
_HEARTBEAT_S = 1.0
_COMMITTED_WITHIN_S = 30
_LOOKS = 3


class Scout:
    """Reads ahead on behalf of one stream.

    Invariants:
        I1. ``_seen`` holds every statement that ends in ``(_since, _upto]`` and may change
            a definition.

    Owner: the source; one question at a time, in a thread.
    """

    def __init__(self) -> None:
        self._since = self._upto = Place(0, 0)
        self._file = ""
        self._checksums = False
        self._seen: list[tuple[Place, Statement]] = []

    def look(
        self, connection: Connection, settings: Settings, file: str, offset: int, gtid: str
    ) -> Outlook:
        """The catalogue as it is now, and the statements behind a place in the binlog.

        ``gtid`` is the transaction at that place: what MySQL shows is older than its binlog
        until a transaction that is there already has been committed.

        Raises:
            SourceUnavailable: the server does not answer, or does not commit the transaction.
        """
        here = Place.of(file, offset)
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
            self._extend(settings, here, file, after)
            ahead = [(place, statement) for place, statement in self._seen if place > here]
            if not any(place > before for place, _ in ahead):
                break  # Nothing came in while the catalogue was read.
        return Outlook(catalogue, tuple(statement for _, statement in ahead))

    def _extend(self, settings: Settings, here: Place, file: str, end: Place) -> None:
        if not self._since <= here <= self._upto:
            self._since = self._upto = here
            self._file = file
            self._seen.clear()
        self._since = here
        self._seen = [(place, statement) for place, statement in self._seen if place > here]
        if end > self._upto:
            self._read(settings, end)

    def _read(self, settings: Settings, end: Place) -> None:
        where = f"{settings.host}:{settings.port} (database={settings.name})"
        _log.info("database %s: looking ahead from %s to %s", settings.name, self._upto, end)
        connection = Connection(settings)
        try:
            self._checksums = connection.row("SELECT @@global.binlog_checksum")[0] == "CRC32"
            raw = connection.start_binlog(
                BinlogRequest(self._file, self._upto.offset),
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
                    if self._take(event):
                        self._upto = end
                    packets.used()
        finally:
            connection.close()

    def _take(self, event: memoryview) -> bool:
        """Use one event; returns whether the server has nothing more, and waits."""
        header = events.read_header(event)
        if header.type in (EventType.HEARTBEAT, EventType.HEARTBEAT_V2):
            return True
        if header.type == EventType.FORMAT_DESCRIPTION:
            self._checksums = events.read_checksum_algorithm(event) == 1
            return False
        where = f"binlog {self._file}, before {header.end_offset}"
        if header.type == EventType.ROTATE:
            body = events.checked_body(header, event, self._checksums, where)
            file, offset = events.read_rotate(body)
            # The first one is artificial, and names the place that was asked for.
            if (place := Place.of(file, offset)) > self._upto:
                self._file, self._upto = file, place
            return False
        if not header.end_offset or header.flags & events.ARTIFICIAL:
            return False
        self._upto = max(self._upto, Place(self._upto.file_number, header.end_offset))
        if header.type == EventType.QUERY:
            body = events.checked_body(header, event, self._checksums, where)
            statement = Statement(*events.read_query(body))
            if not statement.changes_nothing:
                self._seen.append((self._upto, statement))
        return False


def _end(connection: Connection) -> Place:
    """The place behind the last event that the server has written."""
    status = "SHOW BINARY LOG STATUS" if connection.is_mysql else "SHOW MASTER STATUS"
    file, offset = connection.row(status)[:2]
    return Place.of(str(file), int(offset))
