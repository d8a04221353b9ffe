"""The copy of a database that is compared with its source, over HTTP or in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, Self

import numpy as np

from databus.bootstrap.reading.bootstrap_stream import Piece
from databus.bootstrap.reading.frame_ranges import FrameRange, Starts, changes_from, state_from
from databus.bootstrap.reading.range_stream import RangeContent, RangeStream
from databus.bootstrap.reading.stored_database import StoredDatabase
from databus.bootstrap.runs.parquet_runs import RunFile
from databus.common.access.credentials import Credentials
from databus.common.checkpoint import ORIGIN, Position, decode_position
from databus.common.errors import (
    ServerUnavailable,
    TooManyRequests,
    from_error_frame,
    requested_pause_s,
)
from databus.common.filters.stream_filter import StreamFilter
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FIRST_CONTROL_OP, FrameSplitter, Op
from databus.common.http.peer_answers import MAX_BODY_BYTES
from databus.common.http.peer_client import PeerAnswer, PeerClient
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.common.schema.source_schema import SchemaSet, SourceSchema

PIECE_BYTES = 4 << 20
_SILENCE_S = 60.0

Blocks = AsyncGenerator[bytes, None]


class Copy(Protocol):
    """The copy's part of a comparison.

    ``state`` gives a source's rows as blocks of frames, ``changes`` the last frame of each key
    that changed after ``since``; both end where the copy's log ended when they began.
    """

    async def end(self) -> Position:
        """The position up to which the copy has everything."""

    async def schemas(self, source: str) -> SchemaSet:
        """All versions of a source's schema."""

    def state(self, source: str) -> Blocks:
        """The rows of a source now."""

    def changes(self, source: str, since: Position) -> Blocks:
        """The changes in a source after ``since``."""


class HttpPeer:
    """JSON and binary requests to one server's database; its errors are raised as their classes.

    Owner: one event loop; ``async with`` opens and closes its connections.
    Raises: ServerUnavailable if it does not answer; the error that it answered with.
    """

    def __init__(self, server: str, database: str, credentials: Credentials | None = None) -> None:
        self.url = f"{server.rstrip('/')}/v1/{database}"
        self._http = PeerClient(credentials=credentials)

    async def __aenter__(self) -> Self:
        self._http.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def request(self, method: str, path: str, body: Any = None, **query: str) -> PeerAnswer:
        """An answer without an error; the caller must close it.

        A server that has too many requests is requested again, after the time that it names.
        """
        while True:
            try:
                return await self._http.request(
                    method,
                    self.url,
                    f"/{path}",
                    query=query,
                    json=body,
                    headers={"Accept": FRAMES_TYPE if method == "GET" else "*/*"},
                    silence_s=_SILENCE_S,
                )
            except TooManyRequests as error:
                await asyncio.sleep(requested_pause_s(error) or 1.0)

    async def body(self, method: str, path: str, body: Any = None, **query: str) -> bytes:
        """The whole body of an answer."""
        async with await self.request(method, path, body, **query) as answer:
            return await answer.body(MAX_BODY_BYTES)

    async def document(
        self, method: str, path: str, body: Any = None, **query: str
    ) -> dict[str, Any]:
        """The JSON object of the answer."""
        async with await self.request(method, path, body, **query) as answer:
            return await answer.json_object()


class ServedCopy:
    """The copy that a bootstrap server serves.

    Owner: one task.
    """

    def __init__(self, server: HttpPeer) -> None:
        self._server = server

    async def sources(self) -> list[str]:
        """The names of the sources that it has."""
        document = await self._server.document("GET", "sources")
        return [item["name"] for item in document["sources"]]

    async def end(self) -> Position:
        """See ``Copy.end``."""
        return decode_position(await self._server.document("GET", "targetSCN"))

    async def schemas(self, source: str) -> SchemaSet:
        """See ``Copy.schemas``."""
        document = await self._server.document("GET", "register", sources=source)
        return SchemaSet(SourceSchema.from_json(one["schema"]) for one in document["schemas"])

    def state(self, source: str) -> Blocks:
        """See ``Copy.state``."""
        return self._frames("snapshot", sources=source)

    def changes(self, source: str, since: Position) -> Blocks:
        """See ``Copy.changes``."""
        return self._frames("changes", sources=source, since=f"{since.scn}:{since.seq}", mode="net")

    async def _frames(self, path: str, **query: str) -> Blocks:
        """The frames of an answer.

        Raises:
            ServerUnavailable: the connection was cut.
            DatabusError: the error that the server put into the answer.
        """
        splitter = FrameSplitter()
        is_whole = False
        async with await self._server.request("GET", path, **query) as answer:
            while chunk := await answer.read():
                block = splitter.feed(chunk)
                if not block:
                    continue
                columns = frame_format.scan(block, verify=False)
                for index in np.flatnonzero(columns.op >= FIRST_CONTROL_OP).tolist():
                    view = frame_format.trusted_frame(memoryview(block), int(columns.offset[index]))
                    if view.op == Op.ERROR:
                        raise from_error_frame(bytes(view.after or b""))
                    is_whole = is_whole or view.op == Op.CHECKPOINT
                yield block
        if not is_whole:
            raise ServerUnavailable(f"the answer of {self._server.url}/{path} ended early")


class LocalCopy:
    """The copy in this process's store: for the log writer, which repairs it.

    Owner: one task; the log is open in this process.
    """

    def __init__(self, database: StoredDatabase) -> None:
        self._database = database

    async def end(self) -> Position:
        """See ``Copy.end``."""
        return self._database.state().window

    async def schemas(self, source: str) -> SchemaSet:
        """See ``Copy.schemas``."""
        return self._database.schemas()

    def state(self, source: str) -> Blocks:
        """See ``Copy.state``."""
        origin = self._database.origin()
        return self._frames(source, RangeContent.STATE, lambda until: state_from(until, origin))

    def changes(self, source: str, since: Position) -> Blocks:
        """See ``Copy.changes``."""
        starts = changes_from(since, every_change=False)
        return self._frames(source, RangeContent.NET, lambda _: starts)

    async def _frames(
        self, source: str, content: RangeContent, starts: Callable[[Position], Starts]
    ) -> Blocks:
        database, until = self._database, self._database.state().window
        wanted = StreamFilter(sources=(source,))

        def opening(may_open: Callable[[RunFile], bool]) -> FrameRange:
            return FrameRange(
                database.store,
                database.log,
                starts(until),
                until,
                every_change=False,
                may_open=may_open,
                retain=lambda retired_us: readers.retain(stream, retired_us),
            )

        stream = RangeStream(
            database=database.name,
            clock=database.state().clock,
            since=ORIGIN,
            until=until,
            content=content,
            opening=opening,
            stream_filter=wanted,
            source_ids=database.source_ids(wanted),
            piece_bytes=PIECE_BYTES,
        )
        pieces, readers = stream.pieces(), database.open_readers

        def next_piece() -> Piece | None:
            readers.renew()
            return next(pieces, None)

        await asyncio.to_thread(readers.enter, stream)
        try:
            while (piece := await asyncio.to_thread(next_piece)) is not None:
                if len(piece.frames):
                    yield bytes(piece.frames)
        finally:
            pieces.close()
            readers.leave(stream)
