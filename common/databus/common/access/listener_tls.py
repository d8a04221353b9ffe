"""TLS contexts of our listeners, made again when the files of the certificate change.

What is not here: which listeners have TLS (``[http.tls]``), and the contexts of clients
(``credentials``).
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from databus.common.errors import ConfigError

if TYPE_CHECKING:  # the client library uses this module, and reads no configuration
    from databus.common.access_config import TlsConfig

LOOK_EVERY_S = 1.0
"""How often the files are looked at, at most; a new connection triggers it."""

Signature = tuple[tuple[int, int, int], ...]

_log = logging.getLogger("databus.http")


def signature_of(*paths: Path | str) -> Signature:
    """What changes when one of the files is replaced or rewritten.

    Raises:
        ConfigError: a file is missing or cannot be looked at.
    """
    found = []
    for path in paths:
        try:
            status = Path(path).stat()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
        found.append((status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(found)


class ServerTls:
    """The TLS context of one listener.

    Invariants:
        I1. ``context`` is made of one version of the files.  While a new version cannot be used,
            for instance because the key is not yet the certificate's, the previous one stays.
        I2. A connection keeps the context of its handshake.

    Owner: one event loop.
    Raises: ConfigError from the constructor if the files cannot be used.
    """

    def __init__(self, config: TlsConfig, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock_s = clock_s
        self._paths = [config.certificate, config.key]
        if config.client_ca is not None:
            self._paths.append(config.client_ca)
        self._refused: Signature = ()
        self._signature = signature_of(*self._paths)
        self._context = _server_context(config)
        self._look_at_s = clock_s() + LOOK_EVERY_S

    def context(self) -> ssl.SSLContext:
        """The context for a new connection."""
        now_s = self._clock_s()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_EVERY_S
            self._refresh()
        return self._context

    def _refresh(self) -> None:
        found: Signature = ()
        try:
            found = signature_of(*self._paths)
            if found == self._signature:
                return
            self._context = _server_context(self._config)
        except ConfigError as error:
            if found != self._refused or not found:
                _log.warning("the TLS files have changed, and cannot be used: %s", error.message)
            self._refused = found
            return
        self._signature = found
        _log.info("the certificate of %s was read again", self._config.certificate)


def server_tls(config: TlsConfig | None) -> ServerTls | None:
    """The TLS of a listener as it is configured; None without."""
    return None if config is None else ServerTls(config)


def _server_context(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, config.certificate, config.key)
    if config.client_ca is not None:
        load_authorities(context, config.client_ca)
        is_required = config.client_certificates == "required"
        context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
    return context


def load_certificate(context: ssl.SSLContext, certificate: Path | str, key: Path | str) -> None:
    """Let ``context`` present a certificate.

    Raises:
        ConfigError: a file cannot be read, or they do not belong together.
    """
    try:
        # Without a callback, OpenSSL would prompt for the password of an encrypted key.
        context.load_cert_chain(certificate, key, password=_no_password)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"the certificate {certificate} and the key {key} cannot be used: {_reason(error)}; "
            f"both are PEM files, and the key has no password"
        ) from error


def load_authorities(context: ssl.SSLContext, authorities: Path | str) -> None:
    """Let ``context`` trust the authorities in a file.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    try:
        context.load_verify_locations(cafile=authorities)
    except OSError as error:
        raise ConfigError(
            f"the authorities in {authorities} cannot be used: {_reason(error)}; it is a PEM file"
        ) from error


def _no_password() -> str:
    return ""


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
