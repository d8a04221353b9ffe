"""Verifies the tokens of an identity provider (OpenID Connect), by PyJWT.

Pure: the keys come from ``identity_keys``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from databus.common.access.authority import TOKEN_PREFIX, ProviderIdentity
from databus.common.errors import ServerUnavailable, Unauthenticated
from databus.common.extras import imports_of_extra

if TYPE_CHECKING:
    from databus.common.access_config import OidcConfig

_REQUIRED = ["exp", "iss", "aud", "sub"]
_DOTS = 2


class UnknownKey(Exception):
    """A token is signed with a key that is not loaded: it may be a new one."""


def is_identity_token(token: str) -> bool:
    """Whether a token has the form of a provider's, rather than of ours."""
    return token.count(".") == _DOTS and not token.startswith(TOKEN_PREFIX)


class IdentityTokens:
    """One issuer and its public keys.

    Invariants:
        I1. A token is accepted only with a signature of a loaded key, by a configured algorithm
            that fits the key, for the issuer and the audience, within its times.
        I2. No symmetric key and no symmetric algorithm is ever used.

    Owner: one event loop.
    Raises: MissingDependency from the constructor if PyJWT is not installed.
    """

    def __init__(self, config: OidcConfig) -> None:
        with imports_of_extra("oidc", package="PyJWT", needed_by="[auth.oidc]"):
            import jwt
            import jwt.algorithms  # with cryptography, or it has no signatures with public keys
        self._jwt = jwt
        self._config = config
        self._keys: list[dict[str, Any]] = []

    def load(self, document: Any) -> int:
        """Use the keys of a JSON Web Key Set, and no others; returns how many can be used.

        Raises:
            ServerUnavailable: it is no such set, or has no key that can be used.
        """
        entries = document.get("keys") if isinstance(document, Mapping) else None
        keys = [key for one in entries or () if (key := self._key(one)) is not None]
        if not isinstance(entries, list) or not keys:
            raise ServerUnavailable(f"{self._config.jwks} has no key for signatures")
        self._keys = keys
        return len(keys)

    def _key(self, entry: Any) -> dict[str, Any] | None:
        """A public key for signatures; None for any other entry."""
        is_usable = isinstance(entry, Mapping) and entry.get("kty") in ("RSA", "EC", "OKP")
        if not is_usable or entry.get("use", "sig") != "sig":
            return None
        public = {name: value for name, value in entry.items() if name != "d"}
        try:
            self._jwt.PyJWK(public)
        except (self._jwt.PyJWTError, ValueError, TypeError, KeyError):
            return None
        return public

    def verify(self, token: str) -> ProviderIdentity:
        """The caller that a token names.

        Raises:
            UnknownKey: no loaded key has the token's ``kid``.
            Unauthenticated: the token is refused; the message does not have it.
        """
        try:
            header = self._jwt.get_unverified_header(token)
            algorithm, kid = header.get("alg"), header.get("kid")
            if algorithm not in self._config.algorithms:
                accepted = ", ".join(self._config.algorithms)
                raise Unauthenticated(
                    f"the token's signature is by {str(algorithm)[:20]!r}; accepted are {accepted}"
                )
            claims = self._jwt.decode(
                token,
                self._key_of(kid, algorithm),
                algorithms=[algorithm],
                audience=self._config.audience,
                issuer=self._config.issuer,
                leeway=self._config.leeway,
                options={"require": _REQUIRED},
            )
        except (self._jwt.PyJWTError, ValueError, TypeError) as error:
            raise Unauthenticated(f"the token is refused: {error}") from None
        until_s = float(claims["exp"]) + self._config.leeway
        return ProviderIdentity(
            self._config.issuer, str(claims["sub"]), self._roles(claims), until_s
        )

    def _key_of(self, kid: Any, algorithm: str) -> Any:
        found = [key for key in self._keys if key.get("kid") == kid]
        if kid is None and len(self._keys) == 1:
            found = self._keys
        if not found:
            raise UnknownKey(
                f"the token is signed with the key {str(kid)[:100]!r}, which {self._config.jwks} "
                "does not have"
            )
        if found[0].get("alg", algorithm) != algorithm:
            raise Unauthenticated(f"the token's key is not for signatures by {algorithm}")
        return self._jwt.PyJWK(found[0], algorithm=algorithm)

    def _roles(self, claims: Mapping[str, Any]) -> frozenset[str]:
        value: Any = claims
        if self._config.claim in claims:
            value = claims[self._config.claim]
        else:
            for name in self._config.claim.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            return frozenset(value.split())
        listed = value if isinstance(value, list) else []
        return frozenset(one for one in listed if isinstance(one, str))
