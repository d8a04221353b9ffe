"""What our clients present to servers, and which servers they trust.

A token is never in an argument of a process.  It comes from a file, which is read again at each
request, from the environment, or from the application.
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from databus.common.access.listener_tls import (
    Signature,
    load_authorities,
    load_certificate,
    signature_of,
)
from databus.common.errors import ConfigError
from databus.common.loopback import is_loopback

ENVIRONMENT: Mapping[str, str] = {
    "token": "DATABUS_TOKEN",
    "token_file": "DATABUS_TOKEN_FILE",
    "ca": "DATABUS_CA",
    "certificate": "DATABUS_CERTIFICATE",
    "key": "DATABUS_KEY",
}
"""The environment variable of each field of ``Credentials``."""
MAX_TOKEN_CHARS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The credentials of a client; the empty ones trust the system's authorities.

    ``token`` or ``token_file`` gives a bearer token.  ``ca`` is a file of authorities, instead of
    the system's.  ``certificate`` and ``key`` are what the client presents in mutual TLS.

    Raises: ConfigError from every method, if a file cannot be used.
    """

    token: str = field(default="", repr=False)
    token_file: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if self.token and self.token_file:
            raise ConfigError("token and token_file are both given; give one of them")
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("certificate and key belong together; give both or none")

    def or_environment(self, environment: Mapping[str, str] = os.environ) -> Credentials:
        """The same, with what is not given taken from the environment."""
        found = {name: environment.get(variable, "") for name, variable in ENVIRONMENT.items()}
        if self.token or self.token_file:
            found |= {"token": self.token, "token_file": self.token_file}
        if self.certificate:
            found |= {"certificate": self.certificate, "key": self.key}
        if self.ca:
            found["ca"] = self.ca
        return Credentials(**found)

    def headers(self, url: str) -> dict[str, str]:
        """The header for a request to ``url``; none without a token.

        Raises:
            ConfigError: the token would cross a network unencrypted.
        """
        if not (self.token or self.token_file):
            return {}
        try:
            parts = urlsplit(url)
        except ValueError:
            return {}  # The request reports that the URL is not valid.
        if parts.username is not None:
            return {}  # The URL has credentials of its own, for a proxy in front of the server.
        if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
            raise ConfigError(
                f"the token is not sent to {parts.scheme}://{parts.hostname}, because it would "
                f"cross the network unencrypted; use https://"
            )
        return {"Authorization": f"Bearer {self._bearer()}"}

    def _bearer(self) -> str:
        token = self.token
        if self.token_file:
            try:
                with Path(self.token_file).open(encoding="ascii") as file:
                    token = file.read(MAX_TOKEN_CHARS).strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not ASCII"
                raise ConfigError(f"token_file {self.token_file}: {reason}") from None
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            origin = f"in {self.token_file}" if self.token_file else "that was given"
            raise ConfigError(f"the token {origin} is empty, or has characters that no token has")
        return token

    def context(self, url: str) -> ssl.SSLContext | None:
        """The TLS context for ``url``, of the present versions of the files; None for http."""
        if not url.startswith("https://"):
            return None
        paths = [path for path in (self.ca, self.certificate, self.key) if path]
        return _client_context(self.ca, self.certificate, self.key, signature_of(*paths))


@functools.lru_cache(maxsize=32)
def _client_context(ca: str, certificate: str, key: str, _: Signature) -> ssl.SSLContext:
    if ca:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, ca)
    else:
        context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate:
        load_certificate(context, certificate, key)
    return context
