"""A child relay's HTTP client of one parent: registration, stream, forwarded dump requests.

``chained_source.py`` decides which parent to use.  Every failure is raised as a DatabusError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from databus.common.access.credentials import Credentials
from databus.common.checkpoint import Position
from databus.common.errors import (
    DatabusError,
    FormatError,
    ServerUnavailable,
    from_error_frame,
)
from databus.common.filters.frame_selection import gather
from databus.common.frame.frame_format import FrameSplitter, Op, read_frame, scan
from databus.common.http.peer_answers import MAX_BODY_BYTES
from databus.common.http.peer_client import PeerAnswer, PeerClient
from databus.common.http.request_parameters import CLIENT_HEADER
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.common.schema.source_schema import SourceSchema

ANSWER_S = 30.0
_READ_BYTES = 1 << 20
_HEADERS = {"Accept": FRAMES_TYPE, CLIENT_HEADER: "relay"}


def parent_client(credentials: Credentials | None = None) -> PeerClient:
    """The connections to parents."""
    return PeerClient(answer_s=ANSWER_S, read_bytes=_READ_BYTES, credentials=credentials)


@dataclass(frozen=True, slots=True)
class ParentRegistration:
    """A parent's clock and its schemas in order of version."""

    clock: str
    schemas: tuple[SourceSchema, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """The content of one piece of a stream.

    ``data`` are the frames for the ring, ``last`` the position of the last of them and
    ``fingerprints`` the schemas that they name; ``passed`` is the newest heartbeat's position.
    """

    data: bytes = b""
    last: Position | None = None
    fingerprints: frozenset[int] = frozenset()
    passed: Position | None = None
    error: DatabusError | None = None


NOTHING = Received()


def sort_out(block: bytes) -> Received:
    """Split whole frames into those for the ring and those of the connection itself.

    The latter are heartbeats and errors; no frame follows an error.
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
    lasting = np.flatnonzero(~transient)
    if not len(lasting):
        return Received(passed=passed, error=error)
    data = block
    if len(lasting) < len(columns):
        lengths = columns.length[lasting].astype(np.int64)
        data = bytes(gather(raw, columns.offset[lasting], lengths))
    newest = int(lasting[-1])
    last = Position(int(columns.scn[newest]), int(columns.seq[newest]))
    of_schemas = lasting[ops[lasting] != Op.END_OF_WINDOW]
    fingerprints = frozenset(np.unique(columns.schema_fp[of_schemas]).tolist()) - {0}
    return Received(data, last, fingerprints, passed, error)


class Following:
    """The open stream of the followed parent.

    Invariants:
        I1. Every returned frame is whole and has a valid CRC, in the order of arrival.
        I2. Frames before an error of the parent are returned before the error is raised.

    Owner: one task; ``close`` must be called.
    Raises: the parent's own error, ServerUnavailable if the stream broke off or ended,
        FormatError if the bytes are damaged.
    """

    def __init__(self, url: str, answer: PeerAnswer) -> None:
        self.url = url
        self.clock = answer.headers.get("Databus-Clock", "")
        epoch = answer.headers.get("Databus-Epoch", "")
        self.epoch = int(epoch) if epoch.isdecimal() else 0
        self.prev = _position(url, answer.headers.get("Databus-Prev"))
        self.newest = _position(url, answer.headers.get("Databus-Max"))
        self.was_heard = False
        self._answer = answer
        self._splitter = FrameSplitter()
        self._error: DatabusError | None = None

    async def receive(self, timeout_s: float) -> Received:
        """The frames that have arrived; NOTHING if no whole frame came within ``timeout_s``."""
        if self._error is not None:
            raise self._error
        try:
            async with asyncio.timeout(timeout_s):
                chunk = await self._answer.read()
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
        """Close the connection."""
        self._answer.close()


class Parent:
    """One parent relay and the database's name there.

    Owner: the session's event loop.
    Raises: only DatabusErrors.
    """

    def __init__(self, url: str, database: str, *, silence_s: float) -> None:
        self.url = url
        self.database = database
        self._silence_s = silence_s

    async def register(self, http: PeerClient, sources: Mapping[str, str]) -> ParentRegistration:
        """The clock and all schema versions."""
        document = await self._json(http, "register", sources)
        try:
            schemas = tuple(SourceSchema.from_json(item["schema"]) for item in document["schemas"])
            return ParentRegistration(str(document["clock"]), schemas)
        except (KeyError, TypeError) as error:
            raise FormatError(f"{self.url} gave a registration without {error}") from error

    async def range(self, http: PeerClient) -> dict[str, Any]:
        """The range that the parent serves, and its status."""
        document = await self._json(http, "sources", {})
        return document if isinstance(document, dict) else {}

    async def follow(self, http: PeerClient, query: Mapping[str, str]) -> Following:
        """The open stream that ``query`` requests."""
        answer = await http.request(
            "GET",
            self.url,
            f"{self._path}/stream",
            query={**query, "follow": "true"},
            headers=_HEADERS,
            silence_s=self._silence_s,
        )
        try:
            return Following(self.url, answer)
        except BaseException:
            answer.close()
            raise

    async def forward(
        self, http: PeerClient, method: str, path: str, body: bytes
    ) -> tuple[int, bytes]:
        """The parent's answer to a request for its fetcher, with any HTTP status."""
        async with await http.request(
            method,
            self.url,
            f"{self._path}{path}",
            data=body or None,
            headers={"Content-Type": "application/json"},
            is_any_status_fine=True,
        ) as answer:
            return answer.status, await answer.body(MAX_BODY_BYTES)

    @property
    def _path(self) -> str:
        return f"/v1/{self.database}"

    async def _json(self, http: PeerClient, name: str, query: Mapping[str, str]) -> Any:
        async with await http.request(
            "GET", self.url, f"{self._path}/{name}", query=query
        ) as answer:
            return await answer.json(FormatError)


def _position(url: str, text: str | None) -> Position:
    scn, _, seq = (text or "").partition(":")
    try:
        return Position(int(scn), int(seq))
    except ValueError:
        raise FormatError(f"{url} sent {text!r}; expected a position scn:seq") from None
