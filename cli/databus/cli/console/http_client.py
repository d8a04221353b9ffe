"""One JSON call to a server of ours, for the commands that ask something and are done."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from databus.common.errors import BadRequest, DatabusError, ServerUnavailable, from_answer
from databus.common.http.peer_answers import OPENER, PLAIN, read_all, read_json

_TIMEOUT_S = 10.0


def call(url: str, *, method: str = "GET", body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object that the server answers; {} if it answers nothing.

    Raises:
        ServerUnavailable: nobody answers there.
        DatabusError: the problem that the server answered.
    """
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"{url!r} is not an http:// or https:// URL")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method)
    for name, value in {"Content-Type": "application/json", **PLAIN}.items():
        request.add_header(name, value)
    try:
        with OPENER.open(request, timeout=_TIMEOUT_S) as answer:
            text = read_all(url, answer)
    except urllib.error.HTTPError as error:
        raise _problem(url, error) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ServerUnavailable(f"{url} does not answer: {reason}") from None
    return _object(url, text) if text else {}


def _problem(url: str, error: urllib.error.HTTPError) -> DatabusError:
    try:
        text = read_all(url, error)
    except (DatabusError, OSError, http.client.HTTPException):  # it broke off
        text = b""
    return from_answer(url, error.code, text)


def _object(url: str, text: bytes) -> dict[str, Any]:
    document = read_json(text, f"the answer of {url}", ServerUnavailable)
    if not isinstance(document, dict):
        raise ServerUnavailable(f"{url} answered {str(document)[:200]}, not an object")
    return document


def split_database(url: str) -> tuple[str, str]:
    """``http://host:port/shop`` as the server's URL and the database's name.

    Raises:
        BadRequest: it does not end with a name.
    """
    base, _, database = url.rstrip("/").rpartition("/")
    if not base.startswith(("http://", "https://")) or base.endswith("/") or not database:
        raise BadRequest(f"{url!r} is not RELAY_URL/DATABASE, such as http://127.0.0.1:8700/shop")
    return base, database
