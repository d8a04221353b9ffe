"""The HTTP client for programs without an event loop; its rules are those of ``peer_client``.

What is not here: concurrent answers, and reused connections.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from databus.common.access.credentials import Credentials
from databus.common.errors import BadRequest, DatabusError, ServerUnavailable, from_answer
from databus.common.http.peer_answers import (
    MAX_JSON_BYTES,
    PLAIN,
    PROBLEM_BYTES,
    broke_off,
    broken_problem,
    no_answer,
    read_json,
    require_plain,
    too_long,
)

_FAILURES = (http.client.HTTPException, OSError)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Nowhere: an answer must not send us to another server."""


def _opener(context: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    """Without the environment's proxies, as ``peer_client``: a token is for the server alone."""
    handlers: list[Any] = [_NoRedirects, urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


class CallAnswer:
    """An answer whose head has come.

    Raises: ServerUnavailable if the connection breaks, or the server sends nothing for too long.
    """

    def __init__(self, server: str, url: str, answer: Any) -> None:
        self.server = server
        self.url = url
        self.headers: Mapping[str, str] = answer.headers
        self._answer = answer

    def read(self, most_bytes: int) -> bytes:
        """The bytes that have arrived, waiting for some; b"" at the end."""
        try:
            piece: bytes = self._answer.read1(most_bytes)
        except _FAILURES as error:
            raise broke_off(self.server, error) from error
        return piece

    def body(self, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
        """The whole body, of ``limit_bytes`` at most."""
        try:
            body = _read(self._answer, limit_bytes + 1)
        except _FAILURES as error:
            raise broke_off(self.server, error) from error
        if len(body) > limit_bytes:
            raise too_long(self.url, limit_bytes)
        return body

    def json_object(self, error: type[DatabusError] = ServerUnavailable) -> dict[str, Any]:
        """The body, a JSON object, or {} for an empty one.

        Anything else raises ``error``.
        """
        body = self.body()
        document = read_json(body, f"the answer of {self.url}", error) if body else {}
        if not isinstance(document, dict):
            raise error(f"{self.url} answered {str(document)[:100]}, which is not an object")
        return document


@contextlib.contextmanager
def peer_call(
    method: str,
    server: str,
    path: str = "",
    *,
    query: Mapping[str, str] | None = None,
    json_body: Any = None,
    headers: Mapping[str, str] | None = None,
    silence_s: float,
    credentials: Credentials | None = None,
) -> Iterator[CallAnswer]:
    """The answer of ``server`` for ``path``.  No pause in it is longer than ``silence_s``.

    What ``credentials`` does not have comes from the environment.

    Raises:
        ServerUnavailable: the server does not answer, breaks off, or encodes the answer.
        BadRequest: the URL is not valid.
        ConfigError: a file of the credentials cannot be used, or the token would be sent
            unencrypted.
        DatabusError: the problem that it answered.
    """
    url = f"{server}{path}"
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"{url!r} is not an http:// or https:// URL")
    presented = (credentials or Credentials()).or_environment()
    whole = server + path  # ``url`` hides a password
    request = urllib.request.Request(
        server + path + (f"?{urllib.parse.urlencode(query)}" if query else ""),
        data=None if json_body is None else json.dumps(json_body).encode(),
        headers={
            "Content-Type": "application/json",
            **PLAIN,
            **(headers or {}),
            **presented.headers(whole),
        },
        method=method,
    )
    try:
        answer = _opener(presented.context(whole)).open(request, timeout=silence_s)
    except urllib.error.HTTPError as error:
        with error:
            raise _problem(url, error) from None
    except _FAILURES as error:
        raise no_answer(server, error) from error
    with answer:
        require_plain(url, answer.headers)
        yield CallAnswer(server, url, answer)


def _problem(url: str, error: urllib.error.HTTPError) -> DatabusError:
    headers: Any = error.headers  # a Message, which has the one method that is needed
    require_plain(url, headers)
    try:
        body = _read(error, PROBLEM_BYTES)
    except _FAILURES as broken:
        return broken_problem(url, error.code, broken)
    return from_answer(url, error.code, body)


def _read(answer: Any, most_bytes: int) -> bytes:
    """The body, or its first ``most_bytes``."""
    body: bytes = answer.read(most_bytes)
    promised = answer.headers.get("Content-Length", "")
    if promised.isdigit() and len(body) < min(int(promised), most_bytes):
        raise http.client.HTTPException(f"{len(body)} of {promised} bytes came")
    return body
