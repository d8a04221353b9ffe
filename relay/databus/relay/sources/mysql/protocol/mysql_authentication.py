"""Signing in to MariaDB and MySQL, to a server that may be anybody's until it is done.

PyMySQL sends the password in clear to whoever asks, encrypts it with whatever key it is given,
takes packets of any size and waits for as long as each read lasts.  What is here bounds that.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pymysql
from pymysql.connections import Connection as PyMySqlConnection

from databus.common.errors import PreflightFailed, SourceUnavailable
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings

CONNECT_S = 10.0
"""For the connection to one address."""
SIGN_IN_S = 20.0
"""For everything from the first byte to the server's consent."""
MAX_PACKET_BYTES = 1 << 20
"""Before the server has consented; afterwards rows come."""
_IN_CLEAR = (b"mysql_clear_password", b"dialog")
_WORTHLESS = (b"mysql_old_password",)
_KEY = b"-----BEGIN"


class SignInConnection(PyMySqlConnection):  # type: ignore[misc]  # PyMySQL has no types
    """PyMySQL's connection, careful until it is signed in.

    Invariants:
        I1. The password leaves in clear only under TLS, and only if the URL allows it; encrypted
            with a key that the server has sent, only under TLS, to a loopback address, or if the
            URL allows it.
        I2. A packet before the consent has at most MAX_PACKET_BYTES.
        I3. What the server sends in clear before a TLS handshake, besides its greeting, is
            refused: it would be taken for what comes under TLS.

    Owner: as the connection's.
    """

    is_signed_in = False
    settings: MySqlSettings

    def _request_authentication(self) -> None:
        super()._request_authentication()
        self.is_signed_in = True

    def write_packet(self, payload: bytes) -> None:
        if not self.is_signed_in and not self._secure:
            self._require_silence()
        super().write_packet(payload)

    def _require_silence(self) -> None:
        """Refuse bytes that the server sends without a request before the sign-in is complete."""
        raw = self._sock
        raw.setblocking(False)
        try:
            early = self._rfile.peek(1)
        except OSError:
            early = b""
        finally:
            raw.settimeout(self._read_timeout)
        if early:
            self._force_close()
            raise SourceUnavailable(
                f"{self.host}:{self.port} sends {len(early)} unrequested bytes in clear before "
                f"the sign-in is complete; the connection may be intercepted"
            )

    def _read_bytes(self, num_bytes: int) -> bytes:
        if not self.is_signed_in and num_bytes > MAX_PACKET_BYTES:
            self._force_close()
            raise SourceUnavailable(
                f"{self.host}:{self.port} announces a packet of {num_bytes} bytes before we are "
                f"signed in; at most {MAX_PACKET_BYTES} are read"
            )
        return bytes(super()._read_bytes(num_bytes))

    def _read_packet(self, *args: Any, **kw: Any) -> Any:
        packet = super()._read_packet(*args, **kw)
        if self.is_signed_in or self._may_use_key or not packet.is_extra_auth_data():
            return packet
        if packet.get_all_data()[1:].startswith(_KEY):
            raise PreflightFailed(
                f"{self.host}:{self.port} asks for the password under a key of its own, without "
                f"TLS; set ssl-mode=required or stricter in the URL, or get-server-public-key=true "
                f"if nobody can be between"
            )
        return packet

    @property
    def _may_use_key(self) -> bool:
        tls = self.settings.tls
        return bool(self._secure) or tls.takes_key or self.settings.is_local

    def _process_auth(self, plugin_name: bytes, auth_packet: Any, handler: Any = None) -> Any:
        name = plugin_name.decode(errors="replace")
        if plugin_name in _WORTHLESS:
            raise PreflightFailed(
                f"{self.host}:{self.port} asks for the password by {name}, which anybody can undo; "
                f"give the user another authentication plugin"
            )
        if plugin_name in _IN_CLEAR and not (self._secure and self.settings.tls.sends_clear):
            raise PreflightFailed(
                f"{self.host}:{self.port} asks for the password in clear ({name}); it was not "
                f"sent. Where that is meant, set ssl-mode=verify_identity (or required) and "
                f"enable-cleartext-plugin=true in the URL"
            )
        return super()._process_auth(plugin_name, auth_packet, handler)


def signed_in(settings: MySqlSettings, **arguments: Any) -> SignInConnection:
    """A connection that is signed in.

    Raises:
        PreflightFailed: what the server asks for is not given to it.
        SourceUnavailable: it does not come to an end within SIGN_IN_S, or is no such server.
        pymysql.err.MySQLError, OSError: as PyMySQL raises them.
    """
    where = f"{settings.host}:{settings.port}"
    connection = SignInConnection(
        host=settings.host, port=settings.port, defer_connect=True, **arguments
    )
    connection.settings = settings
    try:
        raw = socket.create_connection((settings.host, settings.port), CONNECT_S)
    except OSError as error:
        raise SourceUnavailable(f"cannot connect to {where}: {error}") from error
    # A read's time-out begins again with each byte; this one does not.  Its descriptor is its own,
    # for TLS takes the other one over.
    is_late = threading.Event()
    with contextlib.closing(raw.dup()) as same:

        def cut() -> None:
            is_late.set()
            with contextlib.suppress(OSError):
                same.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(SIGN_IN_S, cut)
        timer.daemon = True
        timer.start()
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.connect(raw)
        except (ValueError, IndexError, TypeError, UnicodeError) as error:
            # Its greeting was none, and PyMySQL has taken it apart.
            connection._force_close()
            raise SourceUnavailable(f"{where} is no MariaDB or MySQL: {error}") from error
        except (pymysql.err.MySQLError, OSError) as error:
            if is_late.is_set():
                raise SourceUnavailable(
                    f"{where} did not sign us in within {SIGN_IN_S:g} s"
                ) from error
            raise
        finally:
            timer.cancel()
            timer.join()
    return connection
