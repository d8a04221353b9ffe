"""An identity provider: real keys, a JWKS server in a thread of this process, and its tokens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from databus.common.access_config import AuthConfig, OidcConfig

ISSUER = "https://login.test/realms/data"
AUDIENCE = "databus"
READ = {"actions": ["read"]}


def new_key(algorithm: str) -> Any:
    """A private key for signatures by an algorithm."""
    if algorithm.startswith("ES"):
        return ec.generate_private_key(ec.SECP256R1() if algorithm == "ES256" else ec.SECP384R1())
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def public_entry(kid: str, algorithm: str, key: Any, **more: str) -> dict[str, Any]:
    """A key as a JSON Web Key Set has it."""
    of = jwt.get_algorithm_by_name(algorithm)
    return {**of.to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig", **more}


class IdentityProvider:
    """The keys, by ``kid``, and a server of the public ones.

    Owner: one test; inside ``with``.
    """

    def __init__(self) -> None:
        self.keys: dict[str, tuple[str, Any]] = {}
        self.requests: list[Mapping[str, str]] = []
        self.answer: bytes | None = None
        self.status = 200
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.requests.append(dict(self.headers))
                body = provider.answer if provider.answer is not None else provider.jwks()
                self.send_response(provider.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Not on the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/keys"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(self, kid: str, algorithm: str = "RS256") -> None:
        """A new key."""
        self.keys[kid] = (algorithm, new_key(algorithm))

    def jwks(self) -> bytes:
        """The public keys."""
        entries = [public_entry(kid, *one) for kid, one in self.keys.items()]
        return json.dumps({"keys": entries}).encode()

    def token(self, kid: str = "one", *groups: str, **claims: Any) -> str:
        """A token; a claim that is None is left out."""
        algorithm, key = self.keys[kid]
        return jwt.encode(
            claims_of(*groups, **claims), key, algorithm=algorithm, headers={"kid": kid}
        )

    def config(self, *roles: Mapping[str, Any], **changes: Any) -> OidcConfig:
        """The section ``[auth.oidc]``."""
        given = roles or ({"name": "analysts", "grants": [READ]},)
        fixed = {"issuer": ISSUER, "audience": AUDIENCE, "jwks": self.url, "roles": given}
        return OidcConfig.model_validate({**fixed, **changes})

    def auth(self, *roles: Mapping[str, Any], **changes: Any) -> AuthConfig:
        """The section ``[auth]``."""
        return AuthConfig(oidc=self.config(*roles, **changes))


def claims_of(*groups: str, **claims: Any) -> dict[str, Any]:
    """The claims of a token for ten minutes."""
    now = int(time.time())
    whole = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "iat": now, "exp": now + 600}
    found = {**whole, "groups": list(groups or ("analysts",)), **claims}
    return {name: value for name, value in found.items() if value is not None}
