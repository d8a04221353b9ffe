"""Authentication to MariaDB and MySQL.  Until it succeeds, the server is not trusted.

PyMySQL sends the password in clear text on request, encrypts it with any key that the server
sends, reads packets of any size, and applies its time-out to each read alone.  This module
restricts that.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import Any

import pymysql
from pymysql.connections import Connection as PyMySqlConnection

from databus.common.errors import PreflightFailed, SourceUnavailable
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.tls_contexts import client_context

CONNECT_S = 10.0
"""For the connection to one address."""
SIGN_IN_S = 20.0
"""From the first byte to the end of the authentication."""
MAX_PACKET_BYTES = 1 << 20
"""The limit during the authentication."""
_IN_CLEAR = (b"mysql_clear_password", b"dialog")
_WORTHLESS = (b"mysql_old_password",)
_KEY = b"-----BEGIN"


class SignInConnection(PyMySqlConnection):  # type: ignore[misc]  # PyMySQL has no types
    """PyMySQL's connection with restrictions during the authentication.

    Invariants:
        I1. The password is sent in clear text only over TLS, and only if the URL allows it.  It is
            sent encrypted with a key that the server has sent only over TLS, to a loopback
            address, or if the URL allows it.
        I2. A packet during the authentication has at most MAX_PACKET_BYTES.
        I3. Bytes after the greeting and before the TLS handshake are refused: they would count as
            part of the encrypted stream.

    Owner: that of the connection.
    """

    is_signed_in = False
    settings: MySqlSettings

    def _create_ssl_ctx(self, options: Any) -> ssl.SSLContext:
        """The TLS context; without options (``ssl-mode=preferred``) nothing is verified."""
        if not options:
            return client_context(None, verifies=False, checks_name=False)
        context: ssl.SSLContext = super()._create_ssl_ctx(options)
        return context

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
                f"if no one can intercept the connection"
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
                f"{self.host}:{self.port} asks for the password by {name}, which is insecure; "
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
    """An authenticated connection.

    Raises:
        PreflightFailed: the server asks for credentials that it must not get.
        SourceUnavailable: the authentication takes longer than SIGN_IN_S, or the server is neither
            MariaDB nor MySQL.
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
    # The time-out of a read restarts with each byte; this one does not.  It has a descriptor of its
    # own, because TLS takes over the other one.
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
            # PyMySQL failed on bytes that are no greeting.
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
