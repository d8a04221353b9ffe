"""``[http]`` and ``[auth]``: the listeners' certificates, the callers and their grants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from databus.common.config_values import Section


class TlsConfig(Section):
    """``[http.tls]``: the certificate of every listener. A server reads the files again when they
    change.
    """

    certificate: Path
    """PEM file of the certificate, with the intermediate ones after it. A relative path starts at
    the configuration file.
    Example: certificate = "/etc/databus/server.pem" """

    key: Path
    """PEM file of the certificate's private key, without a password.
    Example: key = "/etc/databus/server.key" """

    client_ca: Path | None = None
    """PEM file of the authorities whose client certificates are accepted. Without it, no client
    presents a certificate.
    Example: client_ca = "/etc/databus/clients.pem" """

    client_certificates: Literal["required", "optional"] = "required"
    """With `client_ca`: whether a client without a certificate may connect.
    Example: client_certificates = "optional" """


class HttpConfig(Section):
    """``[http]``: what the listeners of the relay and of the bootstrap server share."""

    tls: TlsConfig | None = None
    """Certificate of the listeners. Without it, they do not use TLS.
    Example: tls = { certificate = "server.pem", key = "server.key" } """

    insecure: bool = False
    """Whether a listener that is not loopback may start without TLS or without `[auth]`. Set it
    where the network protects the listener.
    Example: insecure = true """

    @property
    def scheme(self) -> str:
        """The scheme of the listeners' URLs."""
        return "http" if self.tls is None else "https"


class GrantConfig(Section):
    """``[[auth.tokens.grants]]``: actions on a part of the databases."""

    actions: tuple[Literal["read", "replicate", "dump", "admin", "monitor"], ...] = Field(
        min_length=1
    )
    """What may be done. `read`: streams, bootstrap, changes, snapshots. `replicate`: chunks of rows
    and releases, for verification and repair. `dump`: dumps. `admin`: resynchronisation. `monitor`:
    status and metrics.
    Example: actions = ["read"] """

    databases: tuple[str, ...] = ("*",)
    """Names of databases, globs allowed.
    Example: databases = ["shop"] """

    sources: tuple[str, ...] = ("*",)
    """Tables: globs over `schema.table`.
    Example: sources = ["public.orders", "public.items"] """

    columns: tuple[str, ...] = ("*",)
    """Names of columns, in every granted table; `*` is all of them. Those of the key are always
    included.
    Example: columns = ["state", "total"] """


class PrincipalConfig(Section):
    """``[[auth]]``: what tokens and certificates have in common."""

    name: str = Field(min_length=1)
    """Name of the caller in errors and logs.
    Example: name = "search-index" """

    grants: tuple[GrantConfig, ...] = ()
    """What the caller may do.
    Example: grants = [{ actions = ["read"], databases = ["shop"], sources = ["public.*"] }] """

    max_streams: int = Field(default=0, ge=0)
    """Largest number of open streams at each worker. 0 for no limit.
    Example: max_streams = 20 """

    max_requests_per_s: float = Field(default=0.0, ge=0)
    """Largest number of requests a second at each worker. 0 for no limit.
    Example: max_requests_per_s = 50 """


class TokenConfig(PrincipalConfig):
    """``[[auth.tokens]]``: a caller with a bearer token, made by `databus token make`."""

    hashes: tuple[Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")], ...] = Field(
        min_length=1
    )
    """Hashes of the valid tokens. List the old and the new one while clients change over.
    Example: hashes = [
      "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ] """


class CertificateConfig(PrincipalConfig):
    """``[[auth.certificates]]``: a caller with a certificate of `client_ca`."""

    subject: str = Field(min_length=1)
    """Subject of the certificate, such as `CN=writer,OU=databus`, globs allowed. The parts are in
    the certificate's order. A backslash stands before `,` and `=` in a value.
    Example: subject = "CN=writer,*" """


class AuthConfig(Section):
    """``[auth]``: who may do what. Without tokens and certificates, everyone may do everything."""

    tokens: tuple[TokenConfig, ...] = ()
    """The callers with tokens.
    Example: tokens = [] """

    certificates: tuple[CertificateConfig, ...] = ()
    """The callers with certificates.
    Example: certificates = [] """

    @property
    def is_on(self) -> bool:
        """Whether requests need a token or a certificate."""
        return bool(self.tokens or self.certificates)

    @pydantic.model_validator(mode="after")
    def _names_are_unique(self) -> AuthConfig:
        names = [one.name for one in (*self.tokens, *self.certificates)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two callers have the name {twice[0]!r}")
        return self


class CredentialsConfig(Section):
    """``[bootstrap.credentials]``: what the log writer presents to the relays.

    What is not given comes from the environment: `DATABUS_TOKEN_FILE`, `DATABUS_CA`,
    `DATABUS_CERTIFICATE` and `DATABUS_KEY`.
    """

    token_file: str = ""
    """File with the token. It is read again at each request. A relative path, here and below,
    starts at the configuration file.
    Example: token_file = "/etc/databus/writer.token" """

    ca: str = ""
    """PEM file of the authorities that sign the relays' certificates. Empty for those of the
    system.
    Example: ca = "/etc/databus/ca.pem" """

    certificate: str = ""
    """PEM file of the certificate to present.
    Example: certificate = "/etc/databus/writer.pem" """

    key: str = ""
    """PEM file of its private key.
    Example: key = "/etc/databus/writer.key" """
