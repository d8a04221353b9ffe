"""Answers of a peer that is not trusted: bounded, and a value or one clear error.

What the clients with an event loop (``peer_client``) and without (``peer_calls``) share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from databus.common.errors import BadRequest, DatabusError, ServerUnavailable

MAX_JSON_BYTES = 64 << 20
"""JSON answers of our servers are far smaller; the list of all schemas is the largest."""
MAX_JSON_MARKS = 8 << 20
"""Most ``[``, ``{``, ``:`` and ``,`` of an answer: three bytes of JSON can become 72 of objects."""
MAX_BODY_BYTES = 1 << 30
"""A chunk of rows for a comparison."""
PROBLEM_BYTES = 1 << 16
"""Most bytes of an error's document that are read."""
PLAIN = {"Accept-Encoding": "identity"}
"""Our clients request plain answers.  They refuse an encoded one, and do not decode it."""
_PIECE_BYTES = 1 << 16


class PeerContent(Protocol):
    """A body that comes in pieces; aiohttp's."""

    async def read(self, n: int) -> bytes:
        """At most ``n`` bytes; b"" at the end."""


def read_json(body: bytes, what: str, error: type[DatabusError] = BadRequest) -> Any:
    """The JSON value in ``body``; ``what`` names it in the error.

    Raises:
        DatabusError: of the class ``error``: it is not JSON, nested too deep, or has more than
            ``MAX_JSON_MARKS`` marks.
    """
    marks = sum(map(body.count, (b"[", b"{", b":", b",")))
    if marks > MAX_JSON_MARKS:
        raise error(f"{what} is not JSON that we read: it has {marks} of [ {{ : and , in it")
    try:
        return json.loads(body)
    except RecursionError:
        raise error(f"{what} is not JSON that we read: it is nested too deep") from None
    except ValueError as problem:
        raise error(f"{what} is not JSON: {problem}") from None


def require_plain(url: str, headers: Mapping[str, str]) -> None:
    """Refuse an encoded answer: no client requests one, and it may unpack to any size.

    Raises:
        ServerUnavailable: it is encoded.
    """
    coding = headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ServerUnavailable(
            f"{url} answered in Content-Encoding {coding[:40]!r}, which was not requested"
        )


def no_answer(server: str, error: BaseException) -> ServerUnavailable:
    """The error for a server that does not answer."""
    return ServerUnavailable(f"{server} does not answer: {_reason(error)}")


def broke_off(server: str, error: BaseException) -> ServerUnavailable:
    """The error for an answer that has begun and breaks off."""
    return ServerUnavailable(f"{server} broke off in the middle of an answer: {_reason(error)}")


def broken_problem(url: str, status: int, error: BaseException) -> ServerUnavailable:
    """The error for an error's document that breaks off."""
    return ServerUnavailable(f"{url} answered {status} and broke off: {_reason(error)}")


def _reason(error: BaseException) -> str:
    return str(getattr(error, "reason", "")) or str(error) or type(error).__name__


def too_long(url: str, limit_bytes: int) -> ServerUnavailable:
    """The error for an answer that is longer than the limit."""
    return ServerUnavailable(f"{url} answered more than {limit_bytes} bytes")


async def read_bounded(
    url: str, headers: Mapping[str, str], content: PeerContent, limit_bytes: int
) -> bytes:
    """The whole body of an answer of bounded size.

    Raises:
        ServerUnavailable: it is longer, or encoded.
    """
    require_plain(url, headers)
    parts, size = list[bytes](), 0
    while part := await content.read(_PIECE_BYTES):
        parts.append(part)
        size += len(part)
        if size > limit_bytes:
            raise too_long(url, limit_bytes)
    return b"".join(parts)
