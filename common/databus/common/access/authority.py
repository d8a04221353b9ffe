"""Tokens and certificates of callers, and which grants they have.

A token is 256 random bits, so its SHA-256 cannot be searched for, and the configuration holds
that alone.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from databus.common.access.grants import EndpointAction, Grant
from databus.common.errors import Unauthenticated

if TYPE_CHECKING:
    from databus.common.access_config import AuthConfig, GrantConfig, PrincipalConfig

TOKEN_PREFIX = "databus_"
"""Scanners for secrets in repositories recognise a token by it."""
HASH_PREFIX = "sha256:"
_TOKEN_BYTES = 32
_MAX_TOKEN_CHARS = 8192
_SHORT = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "stateOrProvinceName": "ST",
    "localityName": "L",
    "domainComponent": "DC",
}


def new_token() -> str:
    """A new random token."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def hash_of(token: str) -> str:
    """What the configuration has of a token."""
    return HASH_PREFIX + hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sends a request; two with equal values may do the same."""

    name: str
    grants: tuple[Grant, ...] = field(repr=False)
    max_streams: int = 0
    max_requests_per_s: float = 0.0
    max_bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class ProviderIdentity:
    """A caller as the identity provider knows it, out of a token that was verified.

    ``until_s`` is the time since 1970 until which the token is valid.
    """

    issuer: str
    subject: str
    roles: frozenset[str]
    until_s: float


@dataclass(frozen=True, slots=True)
class Presented:
    """What a request presents, without the token itself."""

    token_hash: str = field(default="", repr=False)
    subject: str = ""
    identity: ProviderIdentity | None = None


def presented(authorization: Sequence[str], certificate: Mapping[str, Any] | None) -> Presented:
    """What the Authorization headers and the verified certificate of a connection show.

    Raises:
        Unauthenticated: there are several such headers, or it is not a bearer token.
    """
    if not authorization:
        return Presented(subject=subject_of(certificate) if certificate else "")
    return Presented(token_hash=hash_of(bearer_of(authorization)))


def bearer_of(authorization: Sequence[str]) -> str:
    """The token of the Authorization headers.

    Raises:
        Unauthenticated: as ``presented``.
    """
    scheme, _, token = authorization[0].partition(" ")
    if len(authorization) > 1 or scheme.lower() != "bearer" or len(token) > _MAX_TOKEN_CHARS:
        raise Unauthenticated("the Authorization header is not Bearer with one token")
    return token.strip()


def subject_of(certificate: Mapping[str, Any]) -> str:
    """The subject of a certificate as Python gives it: ``CN=app,OU=search``, in its order.

    A backslash stands before ``,``, ``=`` and the backslash in a value, so that no value looks
    like another part.
    """
    parts = []
    for names in certificate.get("subject", ()):
        for name, value in names:
            for mark in "\\,=":
                value = value.replace(mark, f"\\{mark}")
            parts.append(f"{_SHORT.get(name, name)}={value}")
    return ",".join(parts)


class Authority:
    """The principals of one configuration.

    Invariants:
        I1. All hashes are compared, each in constant time, whichever is right.

    Owner: anyone; it does not change.
    """

    def __init__(self, config: AuthConfig) -> None:
        self._oidc = config.oidc
        self._tokens = [
            (value, _principal(one.name, [one])) for one in config.tokens for value in one.hashes
        ]
        self._subjects = [(one.subject, _principal(one.name, [one])) for one in config.certificates]

    def find(self, shown: Presented) -> Principal | None:
        """The principal with these credentials."""
        if shown.identity is not None:
            return self._with_roles(shown.identity)
        found: Principal | None = None
        if shown.token_hash:
            for value, principal in self._tokens:
                if hmac.compare_digest(value, shown.token_hash):
                    found = principal
            return found
        for pattern, principal in self._subjects if shown.subject else ():
            if fnmatch.fnmatchcase(shown.subject, pattern):
                return principal
        return None

    def _with_roles(self, identity: ProviderIdentity) -> Principal | None:
        if self._oidc is None or self._oidc.issuer != identity.issuer:
            return None
        roles = [role for role in self._oidc.roles if role.name in identity.roles]
        return _principal(identity.subject, roles) if roles else None

    def require(self, shown: Presented) -> Principal:
        """The principal with these credentials.

        Raises:
            Unauthenticated: there is none.
        """
        principal = self.find(shown)
        if principal is not None:
            return principal
        if shown.identity is not None:
            raise Unauthenticated(
                f"the token of {shown.identity.subject} names no role that has grants here"
            )
        if shown.token_hash:
            raise Unauthenticated("the token is not known here")
        if shown.subject:
            raise Unauthenticated(f"no principal has the certificate's subject {shown.subject!r}")
        raise Unauthenticated("the request has no token, and its connection no certificate")


def _principal(name: str, parts: Sequence[PrincipalConfig]) -> Principal:
    """A caller has the grants of all its roles, and the widest of their limits."""
    return Principal(
        name,
        tuple(grant for one in parts for grant in _grants(one.grants)),
        int(_widest([one.max_streams for one in parts])),
        _widest([one.max_requests_per_s for one in parts]),
        int(_widest([one.max_bytes_per_s for one in parts])),
    )


def _widest(limits: Sequence[float]) -> float:
    """The widest of some limits; 0 is none."""
    return 0 if 0 in limits else max(limits)


def _grants(configured: Sequence[GrantConfig]) -> tuple[Grant, ...]:
    return tuple(
        Grant(
            frozenset(map(EndpointAction, one.actions)),
            one.databases,
            one.sources,
            None if "*" in one.columns else frozenset(one.columns),
        )
        for one in configured
    )
