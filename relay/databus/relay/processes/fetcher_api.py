"""The HTTP API of a running fetcher on its unix socket: live status and dumps, as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Protocol
from urllib.parse import quote

from aiohttp import web

from databus.common.checkpoint import SEQ_END, Position
from databus.common.errors import BadRequest, UnknownSource
from databus.common.filters.stream_filter import matches
from databus.common.http.http_application import (
    PROBLEM_TYPE,
    Handler,
    json_body,
    json_response,
    make_app,
)
from databus.relay.dumps.chunk_reads import CHUNK_TYPE, pack_answer, parse_question
from databus.relay.dumps.dump_records import (
    FINISHED,
    Dump,
    DumpBook,
    DumpState,
    change_dump,
    new_dump,
)
from databus.relay.dumps.resync import Resync
from databus.relay.dumps.resync_requests import change_table
from databus.relay.ring.data_folder import DatabaseFolder, SocketName
from databus.relay.sources.contract import Chunk, ChunkRequest, RelayingSource


class Fetching(Protocol):
    """The part of the fetcher that the API uses."""

    @property
    def book(self) -> DumpBook:
        """The dumps."""

    @property
    def tables(self) -> Resync:
        """The tables that are not followed."""

    @property
    def skipped_operations(self) -> tuple[str, ...]:
        """The letters of the operations that the database's rules leave out."""

    def dump_document(self, dump: Dump) -> dict[str, Any]:
        """A dump as it is served."""

    def status_document(self) -> dict[str, Any]:
        """The live status."""

    def known_sources(self) -> list[str]:
        """Names of the captured tables; empty before the source was reached once."""

    def release(self, position: Position) -> dict[str, Any]:
        """In block mode: the ring's reader has everything up to ``position``."""

    def followed(self, follower: str, position: Position) -> dict[str, Any]:
        """A follower of this leader has everything up to ``position`` on disk."""

    def resume_document(self) -> dict[str, Any]:
        """What a follower would need to resume in our place, and as of which position."""

    async def dumps_changed(self) -> None:
        """Write the dumps' records to disk and let the runner look at them."""

    def dump_reader_moved(self) -> None:
        """Let the runner look at the dumps; the reader's position on disk may stay older."""

    async def read_chunk(self, request: ChunkRequest) -> tuple[Position, Chunk]:
        """A chunk, and the end of the last window that it certainly shows."""

    def origin(self) -> RelayingSource | None:
        """The relay that runs this database's dumps instead of us; None if they run here."""


class FetcherApi:
    """Serves one fetcher's socket.

    Owner: the fetcher's loop.
    """

    def __init__(self, fetching: Fetching, folder: DatabaseFolder) -> None:
        self._fetching = fetching
        self._folder = folder
        self._name: SocketName | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; a socket that a killed fetcher left is replaced."""
        app = make_app(self._routes())
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        self._folder.socket.unlink(missing_ok=True)
        self._name = SocketName(self._folder.socket)
        await web.UnixSite(self._runner, self._name.path).start()

    def _routes(self) -> Iterator[web.AbstractRouteDef]:
        yield web.get("/status", self._status)
        for prefix in ("", "/v1/{db}"):
            yield web.post(f"{prefix}/release", self._release)
            yield web.get(f"{prefix}/resume_state", self._resume_state)
            yield web.post(f"{prefix}/chunks", self._at_origin(self._chunk))
            yield web.get(f"{prefix}/tables", self._at_origin(self._tables))
            yield web.post(f"{prefix}/tables", self._at_origin(self._change_table))
            yield web.get(f"{prefix}/dumps", self._at_origin(self._list))
            yield web.post(f"{prefix}/dumps", self._at_origin(self._create))
            yield web.get(f"{prefix}/dumps/{{id}}", self._at_origin(self._one))
            yield web.patch(f"{prefix}/dumps/{{id}}", self._at_origin(self._change))
            yield web.delete(f"{prefix}/dumps/{{id}}", self._at_origin(self._cancel))

    def _at_origin(self, handler: Handler) -> Handler:
        """``handler``; if another relay owns the tables, that relay's answer instead."""

        async def answer(request: web.Request) -> web.StreamResponse:
            origin = self._fetching.origin()
            if origin is None:
                return await handler(request)
            if handler == self._chunk:
                path, kind = "/chunks", CHUNK_TYPE
            elif handler in (self._tables, self._change_table):
                path, kind = "/tables", "application/json"
            else:
                dump_id = request.match_info.get("id")
                path = f"/dumps/{quote(dump_id, safe='')}" if dump_id else "/dumps"
                kind = "application/json"
            status, body = await origin.forward(request.method, path, await request.read())
            kind = kind if status < 400 else PROBLEM_TYPE
            return web.Response(status=status, body=body, content_type=kind)

        return answer

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._name is not None:
            self._folder.socket.unlink(missing_ok=True)
            self._name.close()
            self._name = None

    async def _status(self, request: web.Request) -> web.Response:
        return json_response(self._fetching.status_document())

    async def _release(self, request: web.Request) -> web.Response:
        document = await json_body(request)
        scn, seq = document.get("scn"), document.get("seq", SEQ_END)
        follower, known = document.get("follower", ""), {"scn", "seq", "follower"}
        if (
            not (isinstance(scn, int) and isinstance(seq, int) and isinstance(follower, str))
            or document.keys() - known
        ):
            raise BadRequest(
                'a release is {"scn": N, "seq": N}: the reader has everything up to there'
            )
        if follower:
            return json_response(self._fetching.followed(follower, Position(scn, seq)))
        return json_response(self._fetching.release(Position(scn, seq)))

    async def _resume_state(self, request: web.Request) -> web.Response:
        return json_response(self._fetching.resume_document())

    async def _tables(self, request: web.Request) -> web.Response:
        return json_response({"tables": self._fetching.tables.document()})

    async def _change_table(self, request: web.Request) -> web.Response:
        answer = change_table(self._fetching.tables, await json_body(request))
        return json_response({**answer, "tables": self._fetching.tables.document()})

    async def _list(self, request: web.Request) -> web.Response:
        return json_response(
            {"dumps": [self._fetching.dump_document(dump) for dump in self._fetching.book]}
        )

    async def _one(self, request: web.Request) -> web.Response:
        return json_response(self._fetching.dump_document(self._dump(request)))

    async def _create(self, request: web.Request) -> web.Response:
        dump = new_dump(await json_body(request))
        known = self._fetching.known_sources()
        if known and not any(matches(name, dump.sources) for name in known):
            raise UnknownSource(
                f"no source matches {dump.sources}; there are {', '.join(known)}; the status names "
                f"tables that cannot be captured"
            )
        self._fetching.book.add(dump)
        await self._fetching.dumps_changed()
        return json_response(self._fetching.dump_document(dump), status=202)

    async def _change(self, request: web.Request) -> web.Response:
        dump = self._dump(request)
        document = await json_body(request)
        was_waiting = dump.reader is not None
        change_dump(dump, document)
        if document.keys() == {"reader"} and was_waiting and dump.reader is not None:
            # Readers report it many times a second and again after a crash: no write is needed.
            self._fetching.dump_reader_moved()
        else:
            await self._fetching.dumps_changed()
        return json_response(self._fetching.dump_document(dump))

    async def _cancel(self, request: web.Request) -> web.Response:
        dump = self._dump(request)
        if dump.state not in FINISHED:
            dump.state = DumpState.CANCELLED
            await self._fetching.dumps_changed()
        return json_response(self._fetching.dump_document(dump))

    async def _chunk(self, request: web.Request) -> web.Response:
        question = parse_question(await json_body(request))
        low, chunk = await self._fetching.read_chunk(question.request)
        skipped = self._fetching.skipped_operations
        body = await asyncio.to_thread(pack_answer, question, chunk, low, skipped)
        return web.Response(body=body, content_type=CHUNK_TYPE)

    def _dump(self, request: web.Request) -> Dump:
        return self._fetching.book.get(request.match_info["id"])
