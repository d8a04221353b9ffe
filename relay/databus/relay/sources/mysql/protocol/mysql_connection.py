"""Connections to MariaDB and MySQL: the only module that uses PyMySQL and its internals."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pymysql
from pymysql.constants import COMMAND, CR, ER
from pymysql.converters import conversions
from pymysql.cursors import SSCursor

from databus.common.errors import PreflightFailed, SourceUnavailable
from databus.relay.sources.mysql.protocol.mysql_authentication import signed_in
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings

_READ_TIMEOUT_S = 300
_MARIADB_SLAVE_CAPABILITY_GTID = 4
_SECURE_TRANSPORT_REQUIRED = 3159
_REFUSED = frozenset(
    {
        ER.ACCESS_DENIED_ERROR,
        ER.DBACCESS_DENIED_ERROR,
        ER.BAD_DB_ERROR,
        ER.HOST_NOT_PRIVILEGED,
        ER.SPECIFIC_ACCESS_DENIED_ERROR,
        ER.TABLEACCESS_DENIED_ERROR,
        _SECURE_TRANSPORT_REQUIRED,
    }
)
# Values stay the server's text; only types with a single reading are converted.
_PLAIN: dict[Any, Any] = {key: value for key, value in conversions.items() if key not in range(256)}


class ServerError(Exception):
    """The server refused a statement: its error number and message."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"error {number}: {message}")
        self.number = number
        self.message = message


@contextlib.contextmanager
def _translated(settings: MySqlSettings) -> Iterator[None]:
    where = f"{settings.host}:{settings.port} (database={settings.name})"
    try:
        yield
    except (pymysql.err.OperationalError, pymysql.err.InterfaceError) as error:
        number, message = _number_and_text(error)
        if number in _REFUSED:
            raise PreflightFailed(f"{where} refuses us: error {number}: {message}") from None
        if number == CR.CR_SSL_CONNECTION_ERROR or isinstance(
            getattr(error, "original_exception", None), ssl.SSLError
        ):
            raise PreflightFailed(
                f"{where}: no TLS connection with {settings.tls.hint}: {message}"
            ) from None
        if 1000 <= number < 2000 and number not in (ER.CON_COUNT_ERROR, ER.SERVER_SHUTDOWN):
            raise ServerError(number, message) from None
        raise SourceUnavailable(f"{where} does not answer: {number}: {message}") from error
    except (OSError, EOFError, struct.error) as error:
        raise SourceUnavailable(f"{where}: the connection is gone: {error}") from error
    except pymysql.err.MySQLError as error:
        raise ServerError(*_number_and_text(error)) from None


def _number_and_text(error: BaseException) -> tuple[int, str]:
    number = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    return number, str(error.args[1] if len(error.args) > 1 else error)


@dataclass(frozen=True, slots=True)
class BinlogRequest:
    """The start of a binlog stream: a file position, or the complement of a set of GTIDs."""

    file: str
    offset: int
    seen: bytes | None = None


class BinaryResult:
    """The rows of a prepared statement, as bytes of the socket.

    Owner: the connection that made it.
    """

    def __init__(
        self, connection: pymysql.connections.Connection[Any], settings: MySqlSettings
    ) -> None:
        self._connection = connection
        self._settings = settings
        self.is_drained = False
        self._is_buffered = True
        count = connection._read_packet().read_length_encoded_integer()
        self.definitions = [connection._read_packet().get_all_data() for _ in range(count)]
        connection._read_packet()  # the end of the definitions

    def receive(self, room: memoryview) -> int:
        """Receive into ``room``; returns the number of bytes.

        Raises:
            SourceUnavailable: the connection is gone.
        """
        with _translated(self._settings):
            if self._is_buffered:
                # With a large buffer readinto1 would wait for the socket although there is data.
                self._is_buffered = False
                found = self._connection._rfile.read1(len(room))
                room[: len(found)] = found
                count = len(found)
            else:
                count = int(self._connection._rfile.readinto1(room))
            if not count:
                raise EOFError("closed by the server")
            return count

    def ends(self, data: memoryview) -> bool:
        """Whether the packet at the start of ``data``, which is no row, is complete.

        Raises:
            ServerError: the packet reports an error.
        """
        size = int.from_bytes(data[:3], "little")
        if len(data) < 4 + size:
            return False
        self.is_drained = True
        if data[4] == 0xFF:
            number, message = struct.unpack_from("<H", data, 5)[0], bytes(data[13 : 4 + size])
            raise ServerError(number, message.decode(errors="replace"))
        return True


def _end_session(settings: MySqlSettings, number: int, client_port: int) -> None:
    """KILL a session of this relay, from a second connection.

    The session must match by user and client port.  A proxy, or another server under the same
    name, can have given the number to a session of the application.
    """
    with contextlib.suppress(SourceUnavailable, PreflightFailed, ServerError):
        second = MySqlConnection(settings)
        try:
            ours = second.query(
                "SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = %s AND HOST LIKE %s "
                "AND USER = SUBSTRING_INDEX(USER(), '@', 1)",
                (number, f"%:{client_port}"),
            )
            if ours:
                second.query(f"KILL {number}")
        finally:
            second.close()


class MySqlConnection:
    """A blocking connection for queries; used from a worker thread.

    Owner: one task at a time.
    Raises: SourceUnavailable when the connection is gone; PreflightFailed when the server
        refuses the login; ServerError for anything else that it refuses.
    """

    def __init__(self, settings: MySqlSettings, *, answer_s: float = _READ_TIMEOUT_S) -> None:
        self._settings = settings
        self.as_text: set[int] = set()
        """Table definitions whose chunks need the text protocol."""
        with _translated(settings):
            self._connection = signed_in(
                settings,
                user=settings.user,
                password=settings.password,
                charset="utf8mb4",
                **settings.tls.arguments(settings.host),
                autocommit=True,
                read_timeout=answer_s,
                write_timeout=answer_s,
                conv=_PLAIN,
                # A chunk's bounds can be invalid dates.
                init_command="SET SESSION sql_mode='ALLOW_INVALID_DATES', time_zone='+00:00', "
                "character_set_results=utf8mb4, wait_timeout=2147483",
            )

    @property
    def is_mysql(self) -> bool:
        """Whether the server is MySQL rather than MariaDB."""
        return "mariadb" not in self.server_version.lower()

    @property
    def server_version(self) -> str:
        """The version string of the handshake."""
        return str(self._connection.get_server_info())

    def is_at_least(self, *version: int) -> bool:
        """Whether the server's version is this one or a later one of its product."""
        numbers = re.search(
            r"(\d+)\.(\d+)\.(\d+)" + ("" if self.is_mysql else "-Maria"), self.server_version
        )
        return numbers is not None and tuple(map(int, numbers.groups())) >= version

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of one statement; every value is the server's text, or None.

        It raises UnicodeDecodeError for invalid text; the connection stays usable.
        """
        with _translated(self._settings):
            try:
                with self._connection.cursor() as cursor:
                    cursor.execute(sql, tuple(parameters) or None)
                    return [tuple(row) for row in cursor.fetchall()] if cursor.description else []
            except UnicodeDecodeError:
                while not self._connection._read_packet().is_eof_packet():
                    pass
                raise

    def change(self, sql: str, parameters: Sequence[Any]) -> int:
        """Run one statement; returns the number of rows that it changed."""
        with _translated(self._settings), self._connection.cursor() as cursor:
            return int(cursor.execute(sql, tuple(parameters)))

    def query_within(
        self, sql: str, max_bytes: int, *, closes: bool
    ) -> tuple[list[tuple[Any, ...]], bool]:
        """The rows up to the one that reaches ``max_bytes``, and whether more rows may follow.

        The rest is read and discarded; with ``closes`` the connection is closed instead, which is
        quicker for large results.  Raises what ``query`` raises.
        """
        rows: list[tuple[Any, ...]] = []
        size_bytes = 0
        with _translated(self._settings):
            cursor = self._connection.cursor(SSCursor)
            try:
                cursor.execute(sql)
                while size_bytes < max_bytes:
                    row = cursor.fetchone()
                    if row is None:
                        return rows, False
                    rows.append(row)
                    size_bytes += sum(len(value) for value in row if value is not None)
                if closes:
                    cursor._result.unbuffered_active = False
                    self.close()
                return rows, True
            finally:
                if self.is_open:
                    cursor.close()
                cursor.connection = None

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return bool(self._connection.open)

    @contextlib.contextmanager
    def binary_result(self, sql: str) -> Iterator[BinaryResult]:
        """Run one SELECT as a prepared statement, for its rows in the binary protocol.

        A connection whose result was not read to its end is closed.
        """
        inner = self._connection
        with _translated(self._settings):
            inner._execute_command(COMMAND.COM_STMT_PREPARE, sql)
            head = inner._read_packet().get_all_data()
            statement, columns, parameters = struct.unpack_from("<xIHH", head)
            for count in (parameters, columns):
                for _ in range(count + 1 if count else 0):
                    inner._read_packet()
            if parameters:
                inner._execute_command(COMMAND.COM_STMT_CLOSE, struct.pack("<I", statement))
                raise ServerError(0, "there is a ? outside of quotes, which would be a parameter")
            inner._execute_command(COMMAND.COM_STMT_EXECUTE, struct.pack("<IBI", statement, 0, 1))
            result = BinaryResult(inner, self._settings)
        try:
            yield result
        finally:
            if result.is_drained:
                with _translated(self._settings):
                    inner._execute_command(COMMAND.COM_STMT_CLOSE, struct.pack("<I", statement))
            else:
                self.close()

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...]:
        """The row of a statement with one row."""
        return self.query(sql, parameters)[0]

    def literal(self, value: Any) -> str:
        """A value as an SQL literal."""
        return str(self._connection.escape(value))

    def close(self) -> None:
        """Close without waiting for an answer.

        A thread that waits for an answer gets an error.  It holds the receive buffer, and an
        ordinary close would wait for that thread, and so for the server.
        """
        raw = self._connection._sock
        if raw is not None:
            with contextlib.suppress(OSError):
                # Below TLS, because that thread uses the state of TLS.
                socket.socket.shutdown(raw, socket.SHUT_RDWR)
        with contextlib.suppress(Exception):
            self._connection._force_close()

    def abandon(self) -> Callable[[], None]:
        """Close at once.  The returned function ends the session and its query on the server.

        Closing alone does not: the server notices it only at its next write.
        """
        try:
            port = int(self._connection._sock.getsockname()[1])
        except (AttributeError, OSError, TypeError, IndexError):
            port = 0  # closed before
        number = int(self._connection.thread_id())
        self.close()
        return partial(_end_session, self._settings, number, port)

    def start_binlog(
        self, request: BinlogRequest, server_id: int, heartbeat_s: float
    ) -> socket.socket:
        """Request the binlog from a position on.  Returns the socket, which is non-blocking.

        The connection can do nothing else afterwards.
        """
        self.query(
            "SET @master_binlog_checksum = @@global.binlog_checksum, "
            "@source_binlog_checksum = @@global.binlog_checksum"
        )
        self.query(f"SET @mariadb_slave_capability = {_MARIADB_SLAVE_CAPABILITY_GTID}")
        period_ns = int(heartbeat_s * 1e9)
        self.query(
            f"SET @master_heartbeat_period = {period_ns}, @source_heartbeat_period = {period_ns}"
        )
        file = request.file.encode()
        if request.seen is None:
            kind = COMMAND.COM_BINLOG_DUMP
            command = struct.pack("<IHI", request.offset, 0, server_id) + file
        else:
            kind = COMMAND.COM_BINLOG_DUMP_GTID
            command = (
                struct.pack("<HII", 0, server_id, len(file))
                + file
                + struct.pack("<QI", request.offset, len(request.seen))
                + request.seen
            )
        with _translated(self._settings):
            self._connection._execute_command(kind, command)
            raw: socket.socket = self._connection._sock
        raw.setblocking(False)
        return raw
