"""Answers of a peer, which may be anybody: bounded, and a value or one clear error.

What the clients with an event loop (``peer_client``) and without (``peer_calls``) share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from databus.common.errors import BadRequest, DatabusError, ServerUnavailable

MAX_JSON_BYTES = 64 << 20
"""What a server of ours answers in JSON is far smaller; a list of all schemas is the largest."""
MAX_JSON_MARKS = 8 << 20
"""As many of ``[``, ``{``, ``:`` and ``,``: three bytes of JSON can become 72 of objects."""
MAX_BODY_BYTES = 1 << 30
"""A chunk of rows for a comparison."""
PROBLEM_BYTES = 1 << 16
"""As much of an error's document is read."""
PLAIN = {"Accept-Encoding": "identity"}
"""What our clients ask for; what is coded all the same is refused, and not decoded."""
_PIECE_BYTES = 1 << 16


class PeerContent(Protocol):
    """A body that comes in pieces; aiohttp's."""

    async def read(self, n: int) -> bytes:
        """At most ``n`` bytes; b"" at the end."""


def read_json(body: bytes, what: str, error: type[DatabusError] = BadRequest) -> Any:
    """The JSON value in ``body``; ``what`` is what the error calls it.

    Raises:
        DatabusError: of the class ``error``: it is none, nested too deep, or of more values than
            ``MAX_JSON_MARKS`` lets there be.
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
    """Refuse an answer that is coded, which nobody has asked for: it may unpack to anything.

    Raises:
        ServerUnavailable: it is.
    """
    coding = headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ServerUnavailable(f"{url} answered in Content-Encoding {coding[:40]!r}, unasked")


def no_answer(server: str, error: BaseException) -> ServerUnavailable:
    """The error for a server that could not be asked."""
    return ServerUnavailable(f"{server} does not answer: {_reason(error)}")


def broke_off(server: str, error: BaseException) -> ServerUnavailable:
    """The error for an answer that has begun and will not end."""
    return ServerUnavailable(f"{server} broke off in the middle of an answer: {_reason(error)}")


def broken_problem(url: str, status: int, error: BaseException) -> ServerUnavailable:
    """The error for an error that did not come whole."""
    return ServerUnavailable(f"{url} answered {status} and broke off: {_reason(error)}")


def _reason(error: BaseException) -> str:
    return str(getattr(error, "reason", "")) or str(error) or type(error).__name__


def too_long(url: str, limit_bytes: int) -> ServerUnavailable:
    """The error for an answer that is not read to its end."""
    return ServerUnavailable(f"{url} answered more than {limit_bytes} bytes")


async def read_bounded(
    url: str, headers: Mapping[str, str], content: PeerContent, limit_bytes: int
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
            raise too_long(url, limit_bytes)
    return b"".join(parts)
