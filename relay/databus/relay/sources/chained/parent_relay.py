"""One parent relay over HTTP, as a child sees it: registration, stream, dumps handed on.

It asks and listens; which parent to ask, and for what, ``chained_source.py`` decides.  Every
failure comes out as an error of the tree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from databus.common.checkpoint import Position
from databus.common.errors import (
    DatabusError,
    FormatError,
    ServerUnavailable,
    from_answer,
    from_error_frame,
)
from databus.common.filters.frame_selection import gather
from databus.common.frame.frame_format import FrameSplitter, Op, read_frame, scan
from databus.common.http.peer_answers import (
    MAX_BODY_BYTES,
    PLAIN,
    read_bounded,
    read_json,
    require_plain,
)
from databus.common.http.request_parameters import CLIENT_HEADER
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.common.schema.source_schema import SourceSchema

CONNECT_S = 5.0
ANSWER_S = 30.0
_READ_BYTES = 1 << 20
_PROBLEM_BYTES = 1 << 16
# The child's ring holds the bytes as they are; unpacking them would cost more than the network.
_HEADERS = {"Accept": FRAMES_TYPE, "Accept-Encoding": "identity", CLIENT_HEADER: "relay"}


@dataclass(frozen=True, slots=True)
class ParentRegistration:
    """A parent's clock and its schemas in order of version."""

    clock: str
    schemas: tuple[SourceSchema, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """What came with one piece of a stream.

    ``data`` are the frames for the ring, ``last`` the position of the last of them and
    ``fingerprints`` the schemas that they name; ``passed`` is where the newest heartbeat was.
    """

    data: bytes = b""
    last: Position | None = None
    fingerprints: frozenset[int] = frozenset()
    passed: Position | None = None
    error: DatabusError | None = None


NOTHING = Received()


def sort_out(block: bytes) -> Received:
    """Whole frames, parted into those for the ring and those for this reader alone.

    Heartbeats and errors are the latter; nothing follows an error.
    """
    raw = np.frombuffer(block, dtype=np.uint8)
    columns = scan(raw, verify=False)
    ops = columns.op
    transient = (ops == Op.HEARTBEAT) | (ops == Op.ERROR)
    passed: Position | None = None
    error: DatabusError | None = None
    for index in np.flatnonzero(transient):
        view = read_frame(block, int(columns.offset[index]))
        if view.op == Op.HEARTBEAT:
            passed = view.position
        else:
            error = from_error_frame(bytes(view.after or b""))
            break
    kept = np.flatnonzero(~transient)
    if not len(kept):
        return Received(passed=passed, error=error)
    data = block
    if len(kept) < len(columns):
        lengths = columns.length[kept].astype(np.int64)
        data = bytes(gather(raw, columns.offset[kept], lengths))
    newest = int(kept[-1])
    last = Position(int(columns.scn[newest]), int(columns.seq[newest]))
    of_schemas = kept[ops[kept] != Op.END_OF_WINDOW]
    fingerprints = frozenset(np.unique(columns.schema_fp[of_schemas]).tolist()) - {0}
    return Received(data, last, fingerprints, passed, error)


class Following:
    """The open answer of a parent that is followed.

    Invariants:
        I1. Every frame that is handed out is whole and has a valid CRC, in the order of arrival.
        I2. What came before an error of the parent is handed out before the error is raised.

    Owner: one task; ``close`` must be called.
    Raises: the parent's own error, ServerUnavailable where it broke off or ended, FormatError
        where the bytes are damaged.
    """

    def __init__(self, url: str, response: aiohttp.ClientResponse) -> None:
        self.url = url
        self.clock = response.headers.get("Databus-Clock", "")
        self.prev = _position(url, response.headers.get("Databus-Prev"))
        self.newest = _position(url, response.headers.get("Databus-Max"))
        self.was_heard = False
        self._response = response
        self._splitter = FrameSplitter()
        self._error: DatabusError | None = None

    async def receive(self, timeout_s: float) -> Received:
        """What has arrived; NOTHING if no whole frame came within ``timeout_s``."""
        if self._error is not None:
            raise self._error
        try:
            async with asyncio.timeout(timeout_s):
                chunk = await self._response.content.readany()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerUnavailable(f"{self.url} broke off: {_reason(error)}") from error
        except TimeoutError:
            return NOTHING
        if not chunk:
            raise ServerUnavailable(f"{self.url} ended the stream")
        self.was_heard = True
        block = self._splitter.feed(chunk)
        if not block:
            return NOTHING
        received = sort_out(block)
        self._error = received.error
        return received

    def close(self) -> None:
        """Let go of the connection."""
        self._response.close()


class Parent:
    """One parent relay and the database's name there.

    Owner: the session's event loop.
    Raises: the errors of the tree, only.
    """

    def __init__(self, url: str, database: str, *, silence_s: float) -> None:
        self.url = url
        self.database = database
        self._silence_s = silence_s

    async def register(
        self, session: aiohttp.ClientSession, sources: Mapping[str, str]
    ) -> ParentRegistration:
        """The clock and all schema versions."""
        document = await self._json(session, "register", sources)
        try:
            schemas = tuple(SourceSchema.from_json(item["schema"]) for item in document["schemas"])
            return ParentRegistration(str(document["clock"]), schemas)
        except (KeyError, TypeError) as error:
            raise FormatError(f"{self.url} gave a registration without {error}") from error

    async def range(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """What the parent serves, and how it is."""
        document = await self._json(session, "sources", {})
        return document if isinstance(document, dict) else {}

    async def follow(self, session: aiohttp.ClientSession, query: Mapping[str, str]) -> Following:
        """The open stream that ``query`` asks for."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_S, sock_read=self._silence_s
        )
        response = await self._get(session, "stream", {**query, "follow": "true"}, timeout)
        return Following(self.url, response)

    async def forward(
        self, session: aiohttp.ClientSession, method: str, path: str, body: bytes
    ) -> tuple[int, bytes]:
        """The parent's answer to a request for its fetcher, whatever its status."""
        address = f"{self._base}{path}"
        headers = {"Content-Type": "application/json", **PLAIN}
        timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        try:
            async with session.request(
                method,
                address,
                data=body or None,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                text = await read_bounded(address, answer.headers, answer.content, MAX_BODY_BYTES)
                if 300 <= answer.status < 400:
                    raise from_answer(address, answer.status, text)
                return answer.status, text
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnavailable(f"{self.url} does not answer: {_reason(error)}") from error

    @property
    def _base(self) -> str:
        return f"{self.url}/v1/{self.database}"

    async def _json(
        self, session: aiohttp.ClientSession, name: str, query: Mapping[str, str]
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        response = await self._get(session, name, query, timeout)
        try:
            text = await read_bounded(str(response.url), response.headers, response.content)
            return read_json(text, f"the answer of {self.url} for {name}", FormatError)
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnavailable(f"{self.url} broke off: {_reason(error)}") from error
        finally:
            response.release()

    async def _get(
        self,
        session: aiohttp.ClientSession,
        name: str,
        query: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        try:
            response = await session.get(
                f"{self._base}/{name}",
                params=dict(query),
                headers=_HEADERS if name == "stream" else PLAIN,
                timeout=timeout,
                read_bufsize=_READ_BYTES,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnavailable(f"{self.url} does not answer: {_reason(error)}") from error
        try:
            if response.status == 200:
                require_plain(str(response.url), response.headers)
                return response
        except BaseException:
            response.close()
            raise
        try:
            raise await self._refusal(response)
        finally:
            response.close()

    async def _refusal(self, response: aiohttp.ClientResponse) -> DatabusError:
        try:
            text = await response.content.read(_PROBLEM_BYTES)
        except (aiohttp.ClientError, OSError):
            text = b""
        return from_answer(str(response.url), response.status, text)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _position(url: str, text: str | None) -> Position:
    scn, _, seq = (text or "").partition(":")
    try:
        return Position(int(scn), int(seq))
    except ValueError:
        raise FormatError(f"{url} says {text!r} where a position scn:seq is due") from None
