"""Passwords for PostgreSQL's three ways of asking for one.  Pure: bytes in, bytes out."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import unicodedata

from databus.common.errors import SourceUnavailable

MECHANISM = "SCRAM-SHA-256"


def md5_password(user: str, password: str, salt: bytes) -> bytes:
    """The answer to AuthenticationMD5Password."""
    inner = hashlib.md5((password + user).encode()).hexdigest()
    return b"md5" + hashlib.md5(inner.encode() + salt).hexdigest().encode()


class Scram:
    """One SCRAM-SHA-256 exchange (RFC 5802, RFC 7677) without channel binding.

    Invariants:
        I1. ``finish`` succeeds only for a server that knows the password's verifier.

    Owner: one connection attempt.
    Raises: SourceUnavailable where the server's messages are not its part of the exchange.
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
        if not nonce.startswith(self._nonce) or rounds < 1:
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
        """Check that the server knows the password too."""
        expected = b"v=" + base64.b64encode(self._server_signature)
        if not hmac.compare_digest(server_final.split(b",")[0], expected):
            raise SourceUnavailable("the server could not prove that it knows our password")


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
