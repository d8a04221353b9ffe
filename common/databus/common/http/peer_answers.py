"""Answers of a peer, which may be anybody: bounded, and a value or one clear error."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

from databus.common.errors import BadRequest, DatabusError, ServerUnavailable

MAX_JSON_BYTES = 64 << 20
"""What a server of ours answers in JSON is far smaller; a list of all schemas is the largest."""
MAX_BODY_BYTES = 1 << 30
"""A chunk of rows for a comparison."""
PLAIN = {"Accept-Encoding": "identity"}
"""What our clients ask for; what is coded all the same is refused, and not decoded."""
_PIECE_BYTES = 1 << 16


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Nowhere: whoever answers for a server of ours must not send us to another one."""


OPENER = urllib.request.build_opener(_NoRedirects)
"""urllib's, for the clients that wait; it follows no redirect."""


class PeerContent(Protocol):
    """A body that comes in pieces; aiohttp's."""

    async def read(self, n: int) -> bytes:
        """At most ``n`` bytes; b"" at the end."""


def read_json(body: bytes, what: str, error: type[DatabusError] = BadRequest) -> Any:
    """The JSON value in ``body``; ``what`` is what the error calls it.

    Raises:
        DatabusError: of the class ``error``: it is none, or it is nested too deep.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise error(f"{what} is not JSON that we read: it is nested too deep") from None
    except ValueError as problem:
        raise error(f"{what} is not JSON: {problem}") from None


def require_plain(url: str, headers: Mapping[str, str]) -> None:
    """Refuse an answer that is coded, which nobody has asked for: it may unpack to anything.

    Raises:
        ServerUnavailable: it is.
    """
    coding = headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ServerUnavailable(f"{url} answered in Content-Encoding {coding[:40]!r}, unasked")


def read_all(url: str, answer: Any, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The same of an answer of urllib's."""
    require_plain(url, answer.headers)
    body: bytes = answer.read(limit_bytes + 1)
    if len(body) > limit_bytes:
        raise _too_long(url, limit_bytes)
    promised = answer.headers.get("Content-Length", "")
    if promised.isdigit() and len(body) < int(promised):
        raise ServerUnavailable(f"{url} broke off after {len(body)} of {promised} bytes")
    return body


def _too_long(url: str, limit_bytes: int) -> ServerUnavailable:
    return ServerUnavailable(f"{url} answered more than {limit_bytes} bytes of JSON")


async def read_bounded(
    url: str, headers: Mapping[str, str], content: PeerContent, limit_bytes: int = MAX_JSON_BYTES
) -> bytes:
    """The whole body of an answer of bounded size.

    Raises:
        ServerUnavailable: it is longer, or coded.
    """
    require_plain(url, headers)
    parts, size = list[bytes](), 0
    while part := await content.read(_PIECE_BYTES):
        parts.append(part)
        size += len(part)
        if size > limit_bytes:
            raise _too_long(url, limit_bytes)
    return b"".join(parts)
