"""TLS to MariaDB and MySQL: the URL's parameters, and reads from an encrypted socket."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from databus.common.errors import ConfigError, PreflightFailed
from databus.common.loopback import is_loopback
from databus.relay.sources.tls_contexts import client_context

MODES = ("disabled", "preferred", "required", "verify_ca", "verify_identity")
ENCRYPTED_MODES = MODES[2:]
_FILES = ("ssl-ca", "ssl-cert", "ssl-key")
_SWITCHES = ("enable-cleartext-plugin", "get-server-public-key")
PARAMETERS = ("ssl-mode", *_FILES, *_SWITCHES)


@dataclass(frozen=True, slots=True)
class Tls:
    """The modes are those of the servers' own clients.

    ``preferred`` uses TLS if the server offers it, except on a loopback address.  ``required``
    encrypts without a check of the certificate.  ``verify_ca`` requires a certificate that ``ca``
    (or a CA of the system) has signed, ``verify_identity`` also one with the server's name.
    ``cert`` and ``key`` are the files of the client certificate.  ``sends_clear`` allows the
    password in clear text over TLS; ``takes_key`` allows it, without TLS, encrypted with a key
    that the server sends.
    """

    mode: str = "preferred"
    ca: str = ""
    cert: str = ""
    key: str = ""
    sends_clear: bool = False
    takes_key: bool = False

    @property
    def hint(self) -> str:
        """The settings, for messages."""
        return f"ssl-mode={self.mode}" + (f", ssl-ca={self.ca}" if self.ca else "")

    def arguments(self, host: str) -> dict[str, Any]:
        """The arguments for PyMySQL.

        Raises:
            PreflightFailed: a file cannot be read.
        """
        if self.mode == "disabled" or (self.mode == "preferred" and is_loopback(host)):
            return {"ssl_disabled": True}
        if self.mode == "preferred" and not (self.ca or self.cert):
            return {"ssl_disabled": False}
        return {"ssl": self._context()}

    def _context(self) -> ssl.SSLContext:
        setting, path = "ssl-ca", self.ca
        try:
            context = client_context(
                self.ca,
                verifies=self.mode not in ("preferred", "required"),
                checks_name=self.mode == "verify_identity",
            )
            if self.cert:
                setting, path = "ssl-cert", self.cert
                context.load_cert_chain(self.cert, self.key or None)
        except OSError as error:
            raise PreflightFailed(
                f"{setting}={path}{f' (ssl-key={self.key})' if self.key else ''} cannot be used: "
                f"{error}; it takes a PEM file that this process may read"
            ) from None
        return context


PREFERRED = Tls()


def read_tls(database: str, query: str) -> Tls:
    """The settings in a URL's query.

    Raises:
        ConfigError: a parameter or its value is unknown.
    """
    given = dict(parse_qsl(query, keep_blank_values=True))
    for name in given:
        if name not in PARAMETERS:
            raise ConfigError(
                f"database {database}: the URL has the parameter {name!r}; known are "
                f"{', '.join(PARAMETERS)}"
            )
    mode = given.get("ssl-mode", "verify_ca" if "ssl-ca" in given else "preferred").lower()
    if mode not in MODES:
        raise ConfigError(f"database {database}: ssl-mode is {mode!r}; it takes {', '.join(MODES)}")
    if "ssl-key" in given and "ssl-cert" not in given:
        raise ConfigError(f"database {database}: ssl-key is given without ssl-cert")
    switches = [_switch(database, name, given.get(name, "false")) for name in _SWITCHES]
    if switches[0] and mode not in ENCRYPTED_MODES:
        raise ConfigError(
            f"database {database}: enable-cleartext-plugin needs ssl-mode="
            f"{', '.join(ENCRYPTED_MODES)}"
        )
    ca, cert, key = (given.get(name, "") for name in _FILES)
    return Tls(mode, ca, cert, key, *switches)


def _switch(database: str, name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"database {database}: {name} is {value!r}; it takes true or false")
    return value.lower() == "true"


async def receive_into(raw: socket.socket, room: memoryview) -> int:
    """Receive from a non-blocking socket, encrypted or not; the number of bytes, 0 at its end."""
    loop = asyncio.get_running_loop()
    if not isinstance(raw, ssl.SSLSocket):
        return await loop.sock_recv_into(raw, room)
    while True:
        try:
            return raw.recv_into(room)
        except ssl.SSLWantReadError:
            await _readable(loop, raw.fileno())
        except ssl.SSLEOFError:
            return 0


async def _readable(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
