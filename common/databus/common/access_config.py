"""``[http]`` and ``[auth]``: the listeners' certificates, the callers and their grants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import Field

from databus.common.config_values import Bytes, Seconds, Section
from databus.common.loopback import is_loopback

_LEAST_BYTES_PER_S = 1 << 20


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

    max_bytes_per_s: Bytes = Field(default=0)
    """Largest number of bytes a second of streams and of answers of the bootstrap server, of all
    open ones together, at each worker. At least 1 MiB; 0 for no limit. A server above it sends more
    slowly, and refuses nothing.
    Example: max_bytes_per_s = "20MiB" """

    @pydantic.field_validator("max_bytes_per_s")
    @classmethod
    def _is_enough_for_a_part(cls, value: int) -> int:
        if 0 < value < _LEAST_BYTES_PER_S:
            raise ValueError(
                f"max_bytes_per_s is {value}: give at least 1MiB, or 0 for no limit. A part of an "
                "answer has up to 4 MiB, and a client gives up a connection that is silent for long"
            )
        return value


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


class RoleConfig(PrincipalConfig):
    """``[[auth.oidc.roles]]``: what the callers with a value of the claim may do. `name` is that
    value; the limits hold for each caller.
    """


class OidcConfig(Section):
    """``[auth.oidc]``: callers with tokens of an identity provider (OpenID Connect). Needs the
    extra `oidc`.
    """

    issuer: str = Field(min_length=1)
    """The issuer: the claim `iss` of its tokens.
    Example: issuer = "https://login.example.com/realms/data" """

    audience: str = Field(min_length=1)
    """The audience that a token must name in its claim `aud`.
    Example: audience = "databus" """

    jwks: str = Field(pattern=r"^https?://[^/?#@]+(/.*)?$")
    """URL of the issuer's public keys (a JSON Web Key Set), by HTTPS, or on this machine by HTTP.
    Example: jwks = "https://login.example.com/realms/data/protocol/openid-connect/certs" """

    ca: str = ""
    """PEM file of the authorities that sign the certificate of that server. Empty for those of the
    system.
    Example: ca = "/etc/databus/login-ca.pem" """

    claim: str = Field(default="groups", min_length=1)
    """Claim with the caller's roles: a list of texts, or a text of words. Dots lead into objects.
    Example: claim = "realm_access.roles" """

    algorithms: tuple[
        Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"],
        ...,
    ] = Field(default=("RS256", "ES256"), min_length=1)
    """Signatures that are accepted.
    Example: algorithms = ["ES256"] """

    leeway: Seconds = Field(default=30.0, ge=0, le=600)
    """Largest difference between the clocks of the issuer and of this server.
    Example: leeway = "10s" """

    refresh: Seconds = Field(default=300.0, ge=10)
    """Interval after which the keys are loaded again. An unknown key is looked for at once, at most
    every 10 s.
    Example: refresh = "1h" """

    roles: tuple[RoleConfig, ...] = Field(min_length=1)
    """Values of the claim with their grants.
    Example: roles = [{ name = "analysts", grants = [{ actions = ["read"] }] }] """

    @pydantic.model_validator(mode="after")
    def _keys_come_unchanged(self) -> OidcConfig:
        host = urlsplit(self.jwks).hostname or ""
        if self.jwks.startswith("http://") and not is_loopback(host):
            raise ValueError(
                f"jwks {self.jwks}: keys that come unencrypted can be replaced on the way; use "
                "https://"
            )
        names = [role.name for role in self.roles]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two roles have the name {twice[0]!r}")
        return self


class AuthConfig(Section):
    """``[auth]``: who may do what. Without tokens, certificates and an identity provider, everyone
    may do everything.
    """

    tokens: tuple[TokenConfig, ...] = ()
    """The callers with tokens.
    Example: tokens = [] """

    certificates: tuple[CertificateConfig, ...] = ()
    """The callers with certificates.
    Example: certificates = [] """

    oidc: OidcConfig | None = None
    """Callers with tokens of an identity provider: see `[auth.oidc]`.
    Example: oidc = { issuer = "https://a", audience = "b", jwks = "https://a/keys", roles = [
      { name = "analysts" },
    ] } """

    @property
    def is_on(self) -> bool:
        """Whether requests need a token or a certificate."""
        return bool(self.tokens or self.certificates or self.oidc)

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
