"""The bootstrap server: state and catch-up for any number of readers, over HTTP.

It is stateless: everything is in the store, and a reader may go on at any other server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry

from databus.bootstrap import openapi
from databus.bootstrap.metrics import BootstrapCollector
from databus.bootstrap.served import OpenLogs, ServedDatabase, database_folders, is_origin
from databus.bootstrap.stream import PIECE_BYTES, BootstrapStream, Piece
from databus.common.checkpoint import ORIGIN, BootstrapCheckpoint, Position
from databus.common.config import BootstrapConfig
from databus.common.errors import (
    BadRequest,
    ClockMismatch,
    DatabusError,
    InternalError,
    ServerUnavailable,
    UnknownDatabase,
)
from databus.common.filters import StreamFilter, parse_sources
from databus.common.formats import Format, choose_format, error_frame, make_format
from databus.common.http import (
    STOPPING,
    json_response,
    make_app,
    operation_routes,
    query_of,
    serve,
)
from databus.common.openapi import version
from databus.common.query import (
    SOURCES,
    nearest,
    parse_checkpoint,
    parse_count,
    parse_filter,
    parse_position,
)
from databus.common.rendering import Renderer

AHEAD_WAIT_S = 5.0
AHEAD_POLL_S = 0.1
CHECKPOINT_BYTES = 1 << 10

_log = logging.getLogger("databus.bootstrap.server")


@dataclass(frozen=True, slots=True)
class BootstrapRequest:
    """What a reader asks for: the state after ``since``, going on at ``resume`` if given."""

    since: Position
    clock: str | None
    resume: BootstrapCheckpoint | None
    filter: StreamFilter
    format: str
    max_bytes: int | None

    @property
    def has_state(self) -> bool:
        """Whether the reader has a consistent state already."""
        return not is_origin(self.resume.position if self.resume else self.since)


def parse_bootstrap_request(
    query: Mapping[str, str], headers: Mapping[str, str], database: str
) -> BootstrapRequest:
    """The request in a query whose names are known; no start point means from nothing.

    Raises:
        BadRequest, BadFilter, BadCheckpoint, NotAcceptable.
    """
    if "checkpoint" in query and "scn" in query:
        raise BadRequest("give one of checkpoint and scn, not both", parameter="scn")
    checkpoint = parse_checkpoint(query, database)
    resume = checkpoint if isinstance(checkpoint, BootstrapCheckpoint) else None
    if resume is not None:
        since = resume.since
    elif checkpoint is not None:
        since = checkpoint.position
    else:
        since = parse_position(query["scn"]) if "scn" in query else ORIGIN
    return BootstrapRequest(
        since=ORIGIN if is_origin(since) else since,
        clock=checkpoint.clock if checkpoint else None,
        resume=resume,
        filter=parse_filter(query),
        format=choose_format(headers.get("Accept", "*/*"), query.get("format")),
        max_bytes=parse_count(query, "max_bytes", 0, least=1) or None,
    )


class BootstrapServer:
    """The handlers.

    Invariants:
        I1. Nothing of a store is written here.

    Owner: one event loop, in which it was made.
    """

    def __init__(self, config: BootstrapConfig, logs: OpenLogs | None = None) -> None:
        self.config = config
        self.logs = logs or OpenLogs()
        self.started_s = time.time()
        self._databases: dict[str, ServedDatabase] = {}
        self.registry = CollectorRegistry()
        self.registry.register(BootstrapCollector(self.databases))

    def databases(self) -> dict[str, ServedDatabase]:
        """All databases that a writer has begun, by name."""
        for name, folder in database_folders(Path(self.config.data_dir)).items():
            if name not in self._databases:
                self._databases[name] = ServedDatabase(name, folder, self.logs)
        return self._databases

    def routes(self) -> Iterator[web.AbstractRouteDef]:
        """What the server answers to."""
        yield web.get("/v1/databases", self.list_databases)
        yield web.get("/v1/status", self.status)
        yield from operation_routes(
            registry=self.registry, openapi=openapi.document(), missing=self.missing
        )
        yield web.get("/v1/{db}/sources", self.sources)
        yield web.get("/v1/{db}/register", self.register)
        yield web.get("/v1/{db}/startSCN", self.start_scn)
        yield web.get("/v1/{db}/targetSCN", self.target_scn)
        yield web.get("/v1/{db}/bootstrap", self.bootstrap, allow_head=False)

    def missing(self) -> list[str]:
        """What keeps the server from being ready: a source that is not whole, or no log."""
        databases = self.databases()
        wanted = {*self.config.databases, *databases}
        reasons = []
        for name in sorted(wanted):
            database = databases.get(name)
            if database is None or not database.is_ready:
                reasons.append(f"the log of {name} has not begun")
        return reasons if wanted else ["no database has a log yet"]

    def _database(self, request: web.Request) -> ServedDatabase:
        name = request.match_info["db"]
        databases = self.databases()
        if name in databases and databases[name].is_ready:
            return databases[name]
        if name in databases or name in self.config.databases:
            raise ServerUnavailable(f"the log of {name} has not begun yet", database=name)
        if not databases and not self.config.databases:
            # Which databases there are is the relays' word, and the writer has not had it yet.
            raise ServerUnavailable("no database has a log yet", database=name)
        raise UnknownDatabase(
            f"there is no database {name!r} here{nearest(name, databases)}", database=name
        )

    async def list_databases(self, request: web.Request) -> web.Response:
        """GET /v1/databases"""
        query_of(request)
        found = [
            database.range_document()
            if database.is_ready
            else {"name": database.name, "state": "starting"}
            for database in self.databases().values()
        ]
        return json_response({"databases": found})

    async def sources(self, request: web.Request) -> web.Response:
        """GET /v1/{db}/sources"""
        query_of(request)
        database = self._database(request)
        seeding = database.seeding()
        listed = [
            {"name": name, **seeding.get(name, {"state": "unseeded"})}
            for name in database.source_names()
        ]
        return json_response({**database.range_document(), "sources": listed})

    async def register(self, request: web.Request) -> web.Response:
        """GET /v1/{db}/register"""
        query = query_of(request, (SOURCES,))
        database = self._database(request)
        patterns = parse_sources(query["sources"]) if "sources" in query else ()
        return json_response(database.register_document(patterns))

    async def start_scn(self, request: web.Request) -> web.Response:
        """GET /v1/{db}/startSCN: the snapshot's position."""
        query_of(request, openapi.SCN_PARAMETERS)
        return json_response(self._database(request).start_position().to_json())

    async def target_scn(self, request: web.Request) -> web.Response:
        """GET /v1/{db}/targetSCN: up to where a bootstrap goes that begins now."""
        query_of(request, openapi.SCN_PARAMETERS)
        return json_response(self._database(request).target_position().to_json())

    async def status(self, request: web.Request) -> web.Response:
        """GET /v1/status"""
        query_of(request)
        return json_response(
            {
                "version": version(),
                "now_us": time.time_ns() // 1000,
                "uptime_s": round(time.time() - self.started_s, 3),
                "relays": list(self.config.relays),
                "databases": [d.status_document() for d in self.databases().values()],
            }
        )

    async def bootstrap(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/{db}/bootstrap"""
        database = self._database(request)
        query = query_of(request, openapi.BOOTSTRAP_PARAMETERS)
        asked = parse_bootstrap_request(query, request.headers, database.name)
        database.requests += 1
        stream = await self._open(database, asked)
        form = make_format(asked.format, Renderer(database.name, database.schema_of))
        sender = _Sender(database, stream, form, asked.max_bytes)
        # Whatever forbids the answer is found out before its headers are sent.
        first = await sender.read()
        response = web.StreamResponse(
            headers={
                "Content-Type": form.content_type,
                "Cache-Control": "no-store",
                "Databus-Clock": stream.clock,
                "Databus-Max": f"{stream.target.scn}:{stream.target.seq}",
            }
        )
        await response.prepare(request)
        database.readers += 1
        try:
            await sender.send(response, first, request.app[STOPPING])
        except ConnectionError:
            response.force_close()
        finally:
            database.readers -= 1
        return response

    async def _open(self, database: ServedDatabase, asked: BootstrapRequest) -> BootstrapStream:
        state = database.state()
        if asked.clock is not None and asked.clock != state.clock:
            raise ClockMismatch(
                f"the checkpoint belongs to the clock {asked.clock}, the log of "
                f"{database.name} to {state.clock}"
            )
        database.require_sources(asked.filter.sources)
        if not asked.has_state:
            database.require_seeded(asked.filter.sources)
        position = asked.resume.position if asked.resume else asked.since
        target = await self._target(database, position)
        piece_bytes = min(asked.max_bytes or PIECE_BYTES, PIECE_BYTES)
        return BootstrapStream(
            store=database.store,
            log=database.log,
            since=asked.since,
            target=target,
            stream_filter=asked.filter,
            source_ids=database.source_ids(asked.filter),
            resume=asked.resume,
            piece_bytes=max(1, piece_bytes - CHECKPOINT_BYTES),
        )

    async def _target(self, database: ServedDatabase, position: Position) -> Position:
        """The log's last window; a reader that is ahead of it is kept waiting a little.

        Raises:
            ServerUnavailable: the log writer is still behind the reader.
        """
        deadline_s = time.monotonic() + AHEAD_WAIT_S
        while (target := database.target_position()) < position:
            if time.monotonic() >= deadline_s:
                raise ServerUnavailable(
                    f"the log of {database.name} ends at {target}, before your {position}; "
                    "it catches up with the relay, or the relay is the place to ask",
                    target=target.to_json(),
                )
            await asyncio.sleep(AHEAD_POLL_S)
        return target


class _Sender:
    """Writes one bootstrap, reading the next piece while the last one is being sent."""

    def __init__(
        self,
        database: ServedDatabase,
        stream: BootstrapStream,
        form: Format,
        max_bytes: int | None,
    ) -> None:
        self._database = database
        self._stream = stream
        self._pieces = stream.pieces()
        self._format = form
        self._max_bytes = max_bytes
        self._sent_bytes = 0

    async def read(self) -> Piece | None:
        """The next piece; None at the end."""
        return await asyncio.to_thread(next, self._pieces, None)

    async def send(
        self, response: web.StreamResponse, piece: Piece | None, stopping: asyncio.Event
    ) -> None:
        """Send ``piece`` and all that follow; an error becomes the last frame."""
        try:
            await self._send(response, piece, stopping)
        except ConnectionError:
            raise
        except DatabusError as error:
            await self._fail(response, error)
        except Exception:
            _log.exception("the bootstrap of %s failed", self._database.name)
            await self._fail(response, InternalError("the bootstrap failed"))
        finally:
            await asyncio.to_thread(self._pieces.close)
        await response.write_eof()

    async def _send(
        self, response: web.StreamResponse, piece: Piece | None, stopping: asyncio.Event
    ) -> None:
        while piece is not None:
            following = asyncio.ensure_future(self.read())
            try:
                await self._write(response, piece)
                ended = piece.checkpoint is not None and (self._is_full or stopping.is_set())
                piece = await following
                if ended:
                    return
            finally:
                # The thread that reads cannot be interrupted; its piece is waited for.
                await asyncio.gather(following, return_exceptions=True)

    @property
    def _is_full(self) -> bool:
        if self._max_bytes is None:
            return False
        return self._sent_bytes + CHECKPOINT_BYTES >= self._max_bytes

    async def _write(self, response: web.StreamResponse, piece: Piece) -> None:
        for frames in (piece.frames, piece.checkpoint_frame):
            if len(frames):
                data = self._format.render(frames)
                await response.write(data)
                self._sent_bytes += len(data)
                self._database.bytes_served += len(data)
        self._database.rows_served += piece.rows

    async def _fail(self, response: web.StreamResponse, error: DatabusError) -> None:
        await response.write(self._format.render(error_frame(error, self._stream.position)))
        response.force_close()


def bootstrap_app(config: BootstrapConfig, logs: OpenLogs | None = None) -> web.Application:
    """The application of a bootstrap server."""
    return make_app(BootstrapServer(config, logs).routes())


async def serve_bootstrap(
    config: BootstrapConfig,
    listener: socket.socket,
    stop: asyncio.Event,
    logs: OpenLogs | None = None,
) -> None:
    """Serve until ``stop`` is set."""
    await serve(bootstrap_app(config, logs), listener, stop)
