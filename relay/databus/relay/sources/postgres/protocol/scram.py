"""PostgreSQL's authentication methods.  Pure: bytes in, bytes out."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import struct
import unicodedata

from databus.common.errors import PreflightFailed, SourceUnavailable
from databus.relay.sources.postgres.protocol.postgres_settings import PostgresSettings

MECHANISM = "SCRAM-SHA-256"
MAX_ROUNDS = 1_000_000
"""Half a second of CPU time; the servers' default is 4,096."""


def md5_password(user: str, password: str, salt: bytes) -> bytes:
    """The answer to AuthenticationMD5Password."""
    inner = hashlib.md5((password + user).encode()).hexdigest()
    return b"md5" + hashlib.md5(inner.encode() + salt).hexdigest().encode()


IN_CLEAR = (
    "the server asks for the password in clear; it was not sent. Where that is meant, set "
    "sslmode=verify-full (or require) and require_auth=password"
)


class Challenge:
    """The authentication requests of one server, and the answers.

    Invariants:
        I1. A method that ``require_auth`` excludes gets no answer; the password is sent in clear
            text only over TLS.
        I2. A server that has begun SCRAM must prove that it knows the password before the
            authentication succeeds.

    Owner: one connection attempt.
    Raises: PreflightFailed for requests that are refused; SourceUnavailable for malformed ones.
    """

    def __init__(self, settings: PostgresSettings, *, encrypted: bool) -> None:
        self._settings = settings
        self._encrypted = encrypted
        self._scram = Scram(settings.password)
        self._asked = ""
        self._is_proved = True

    def answer(self, code: int, rest: bytes) -> bytes | None:
        """The PasswordMessage's content; None if the server expects none."""
        settings = self._settings
        if code == 0:
            self._require(self._asked or "none")
            if not self._is_proved:
                raise SourceUnavailable(f"{settings.address} broke off SCRAM; it proved nothing")
            return None
        if code == 3:
            if not self._encrypted or "password" not in settings.require_auth:
                raise PreflightFailed(f"{settings.address}: {IN_CLEAR}")
            self._asked = "password"
            return settings.password.encode() + b"\0"
        if code == 5:
            self._require("md5")
            return md5_password(settings.user, settings.password, rest[:4]) + b"\0"
        if code == 10:
            self._require("scram-sha-256")
            if MECHANISM.encode() not in rest.split(b"\0"):
                raise SourceUnavailable(f"the server asks for {rest[:100]!r}; we know {MECHANISM}")
            self._is_proved = False
            first = self._scram.first()
            return MECHANISM.encode() + b"\0" + struct.pack("!I", len(first)) + first
        if code == 11 and not self._is_proved:
            return self._scram.final(rest)
        if code == 12 and not self._is_proved:
            self._scram.finish(rest)
            self._is_proved = True
            return None
        raise SourceUnavailable(
            f"{settings.address} asks for authentication method {code}; "
            "password, md5 and scram-sha-256 are known"
        )

    def _require(self, method: str) -> None:
        if method not in self._settings.require_auth:
            raise PreflightFailed(
                f"{self._settings.address} asks for the password by {method}; require_auth allows "
                f"{', '.join(self._settings.require_auth)}"
            )
        self._asked = method


class Scram:
    """One SCRAM-SHA-256 exchange (RFC 5802, RFC 7677) without channel binding.

    Invariants:
        I1. ``finish`` succeeds only for a server that knows the password's verifier.

    Owner: one connection attempt.
    Raises: SourceUnavailable if the server's messages are no valid part of the exchange.
    """

    def __init__(self, password: str, nonce: str | None = None) -> None:
        self._password = unicodedata.normalize("NFKC", password).encode()
        self._nonce = nonce or base64.b64encode(secrets.token_bytes(18)).decode()
        self._first_bare = f"n=,r={self._nonce}"
        self._server_signature = b""

    def first(self) -> bytes:
        """The client-first-message."""
        return f"n,,{self._first_bare}".encode()

    def final(self, server_first: bytes) -> bytes:
        """The client-final-message, the answer to the server's salt and iteration count."""
        try:
            text = server_first.decode()
            parts = dict(part.split("=", 1) for part in text.split(","))
            salt, rounds = base64.b64decode(parts["s"]), int(parts["i"])
            nonce = parts["r"]
        except (ValueError, KeyError) as error:
            raise SourceUnavailable(f"the server's SCRAM challenge is malformed: {error}") from None
        if not 1 <= rounds <= MAX_ROUNDS:
            raise SourceUnavailable(
                f"the server asks for {rounds} rounds of SCRAM; at most {MAX_ROUNDS} are computed"
            )
        if not nonce.startswith(self._nonce):
            raise SourceUnavailable("the server's SCRAM challenge does not continue our nonce")
        salted = hashlib.pbkdf2_hmac("sha256", self._password, salt, rounds)
        client_key = _mac(salted, b"Client Key")
        without_proof = f"c=biws,r={nonce}"
        signed = f"{self._first_bare},{text},{without_proof}".encode()
        signature = _mac(hashlib.sha256(client_key).digest(), signed)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        self._server_signature = _mac(_mac(salted, b"Server Key"), signed)
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def finish(self, server_final: bytes) -> None:
        """Check that the server knows the password, too."""
        expected = b"v=" + base64.b64encode(self._server_signature)
        if not hmac.compare_digest(server_final.split(b",")[0], expected):
            raise SourceUnavailable("the server could not prove that it knows our password")


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
