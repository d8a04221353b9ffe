"""The bootstrap server: state and catch-up for any number of readers, over HTTP.

It is stateless: everything is in the store, and a reader may resume at any other server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry

from databus.bootstrap.http import bootstrap_endpoints
from databus.bootstrap.http.bootstrap_metrics import BootstrapCollector
from databus.bootstrap.http.bootstrap_requests import (
    BootstrapRequest,
    RangeRequest,
    parse_bootstrap_request,
    parse_changes_request,
    parse_snapshot_request,
    parse_splits_request,
    refuse_relays_filters,
)
from databus.bootstrap.log import log_gaps
from databus.bootstrap.log.configured_stores import Stores, database_folders
from databus.bootstrap.reading.answer_sender import CHECKPOINT_BYTES, answer
from databus.bootstrap.reading.bootstrap_stream import PIECE_BYTES, BootstrapStream
from databus.bootstrap.reading.frame_ranges import FrameRange, changes_from, state_from
from databus.bootstrap.reading.range_stream import RangeContent, RangeStream
from databus.bootstrap.reading.read_pool import ReadPool
from databus.bootstrap.reading.retained_runs import Retain
from databus.bootstrap.reading.split_planner import SplitRequest, plan_splits
from databus.bootstrap.reading.stored_database import OpenLogs, StoredDatabase, is_origin
from databus.bootstrap.runs.open_readers import EVERY_S
from databus.bootstrap.runs.open_run import FileSlot, Wanted
from databus.bootstrap.runs.read_leases import LEASE_S, ReadLeases
from databus.common.access.listener_tls import server_tls
from databus.common.access_config import HttpConfig
from databus.common.checkpoint import ORIGIN, SEQ_END, AtTime, Position
from databus.common.config import BootstrapConfig
from databus.common.errors import (
    BadRequest,
    ClockMismatch,
    FormatError,
    ServerUnavailable,
    StoreError,
    UnknownDatabase,
)
from databus.common.filters.stream_filter import StreamFilter, parse_sources
from databus.common.http.admission import ADMISSION, Admission, granted
from databus.common.http.endpoint_routes import Operations, routes_of
from databus.common.http.http_application import (
    json_response,
    make_app,
    query_of,
    serve,
)
from databus.common.http.http_connections import lost
from databus.common.http.json_rendering import Renderer
from databus.common.http.openapi_document import version
from databus.common.http.request_guard import RequestGuard
from databus.common.http.request_parameters import parse_checkpoint
from databus.common.http.status_page import status_page
from databus.common.http.stream_formats import make_format
from databus.common.spelling import nearest

AHEAD_WAIT_S = 5.0
AHEAD_POLL_S = 0.1


class BootstrapServer:
    """The handlers.

    Invariants:
        I1. Nothing of a store is written here but the notes of readers.

    Owner: one event loop, in which it was made.
    """

    def __init__(self, config: BootstrapConfig, logs: OpenLogs | None = None) -> None:
        self.config = config
        self.logs = logs or OpenLogs()
        self._stores = Stores(config)
        self.started_s = time.time()
        self._databases: dict[str, StoredDatabase] = {}
        self.reads = ReadPool(config.max_readers, config.read_threads)
        self.registry = CollectorRegistry()
        self.registry.register(BootstrapCollector(self.databases))

    def databases(self) -> dict[str, StoredDatabase]:
        """All databases by name: those with a log, and those that this process cannot start."""
        folders = {log.parent.name: log.parent for log in list(self.logs.words)}
        folders |= database_folders(Path(self.config.data_dir))
        for name, folder in folders.items():
            if name not in self._databases:
                store = self._stores.store(name)
                self._databases[name] = StoredDatabase(name, folder, self.logs, store)
        return dict(self._databases)  # another request may add one meanwhile

    def routes(self) -> Iterator[web.RouteDef]:
        """The server's routes."""
        operations = Operations(
            registry=self.registry,
            openapi=bootstrap_endpoints.document(),
            missing=self.missing,
            page=status_page("Databus bootstrap server", "databus.bootstrap.http"),
            metrics_in_thread=True,
        )
        return routes_of(bootstrap_endpoints.ENDPOINTS, self, operations)

    def missing(self) -> list[str]:
        """Why the server is not ready: a source that is not whole, or no log."""
        databases = self.databases()
        wanted = {*self.config.databases, *databases}
        reasons = []
        for name in sorted(wanted):
            database = databases.get(name)
            if database is None:
                reasons.append(f"the log of {name} has not begun")
            elif (reason := database.unready_reason()) is not None:
                reasons.append(reason)
        return reasons if wanted else ["no database has a log yet"]

    def _database(self, request: web.Request) -> StoredDatabase:
        name = request.match_info["db"]
        databases = self.databases()
        if name in databases:
            if (reason := databases[name].unready_reason()) is None:
                return databases[name]
            raise ServerUnavailable(reason, database=name)
        if name in self.config.databases:
            raise ServerUnavailable(f"the log of {name} has not begun yet", database=name)
        if not databases and not self.config.databases:
            # The relays list the databases, and the writer has no list yet.
            raise ServerUnavailable("no database has a log yet", database=name)
        raise UnknownDatabase(
            f"there is no database {name!r} here{nearest(name, databases)}", database=name
        )

    async def answer_databases(self, request: web.Request) -> web.Response:
        """GET /v1/databases"""
        query_of(request)
        access = granted(request)
        databases = [one for name, one in self.databases().items() if access.has_database(name)]
        # In threads, here and below: S3 may take its time.
        found = [
            await asyncio.to_thread(database.range_document)
            if database.is_ready
            else {"name": database.name, "state": "starting"}
            for database in databases
        ]
        return json_response({"databases": found})

    async def answer_sources(self, request: web.Request) -> web.Response:
        """GET /v1/{db}/sources"""
        query_of(request)
        database = self._database(request)
        seeding = database.seeding()
        listed = [
            {"name": name, **seeding.get(name, {"state": "unseeded"})}
            for name in database.source_names()
            if granted(request).has_source(name)
        ]
        ranges = await asyncio.to_thread(database.range_document)
        return json_response({**ranges, "sources": listed})

    async def answer_register(self, request: web.Request) -> web.Response:
        """GET /v1/{db}/register"""
        query = query_of(request)
        database = self._database(request)
        patterns = parse_sources(query["sources"]) if "sources" in query else ()
        return json_response(database.register_document(patterns, granted(request).sources))

    async def answer_start_scn(self, request: web.Request) -> web.Response:
        """GET /v1/{db}/startSCN: the snapshot's position, for the requested sources."""
        database, names = self._requested_sources(request)
        position = await asyncio.to_thread(database.start_position, names)
        return json_response(position.to_json())

    async def answer_target_scn(self, request: web.Request) -> web.Response:
        """GET /v1/{db}/targetSCN: the end of a bootstrap that starts now."""
        database, _ = self._requested_sources(request)
        return json_response(database.target_position().to_json())

    def _requested_sources(self, request: web.Request) -> tuple[StoredDatabase, list[str]]:
        """The database and the sources that a request for positions names."""
        query = query_of(request)
        database = self._database(request)
        checkpoint = parse_checkpoint(query, database.name)
        if checkpoint is not None:
            _check_clock(database, checkpoint.clock)
        patterns = parse_sources(query["sources"]) if "sources" in query else ()
        return database, database.require_sources(patterns, granted(request).sources)

    async def answer_status(self, request: web.Request) -> web.Response:
        """GET /v1/status"""
        query_of(request)
        databases = self.databases().values()
        found = [await asyncio.to_thread(database.status_document) for database in databases]
        return json_response(
            {
                "version": version(),
                "now_us": time.time_ns() // 1000,
                "uptime_s": round(time.time() - self.started_s, 3),
                "relays": [str(relay) for relay in self.config.relays],
                "readers": {
                    "open": self.reads.readers,
                    "most": self.reads.most,
                    "refused": self.reads.refused,
                },
                "databases": found,
            }
        )

    async def answer_bootstrap(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/{db}/bootstrap"""
        database = self._database(request)
        refuse_relays_filters(request.query)
        query = query_of(request)
        parsed = parse_bootstrap_request(query, request.headers, database.name)
        parsed = replace(parsed, filter=granted(request).narrow(parsed.filter))
        form = make_format(parsed.format, Renderer(database.name, database.schema_of))
        with self.reads.reader():
            stream = await self._open(request, database, parsed)
            return await answer(request, database, stream, form, self.reads, parsed.max_bytes)

    async def answer_changes(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/{db}/changes"""
        database = self._database(request)
        refuse_relays_filters(request.query)
        query = query_of(request)
        parsed = parse_changes_request(query, request.headers)
        with self.reads.reader():
            return await self._range(request, database, parsed)

    async def answer_snapshot(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/{db}/snapshot"""
        database = self._database(request)
        refuse_relays_filters(request.query)
        query = query_of(request)
        parsed = parse_snapshot_request(query, request.headers)
        with self.reads.reader():
            return await self._range(request, database, parsed)

    async def answer_splits(self, request: web.Request) -> web.Response:
        """GET /v1/{db}/splits"""
        database = self._database(request)
        query = query_of(request)
        leases = ReadLeases(database.store.storage)
        if "lease" in query:
            if len(query) > 1:
                raise BadRequest("lease= renews a lease and goes with no other parameter")
            await self.reads.aside(functools.partial(leases.renew, query["lease"]))
            return json_response({"lease": query["lease"], "lease_s": LEASE_S})
        parsed = parse_splits_request(query)
        with self.reads.reader():
            resolved = await self._resolved(request, database, parsed.range)
            planned = SplitRequest(
                clock=database.state().clock,
                since=resolved.since,
                is_state=resolved.content is RangeContent.STATE,
                names=resolved.names,
                least=parsed.least,
            )
            plan = await self.reads.until_gone(
                lost(request),
                plan_splits,
                database.store,
                planned,
                _opening(database, resolved, prefers_base=True),
            )
        return json_response(plan.to_json())

    async def _range(
        self, request: web.Request, database: StoredDatabase, parsed: RangeRequest
    ) -> web.StreamResponse:
        resolved = await self._resolved(request, database, parsed)
        form = make_format(parsed.format, Renderer(database.name, database.schema_of))
        stream = _range_stream(database, resolved, form.block_bytes)
        return await answer(request, database, stream, form, self.reads)

    async def _resolved(
        self, request: web.Request, database: StoredDatabase, parsed: RangeRequest
    ) -> _Resolved:
        """The range with positions for its points, if the caller may have it."""
        parsed = replace(parsed, filter=granted(request).narrow(parsed.filter))
        names = database.require_sources(parsed.filter.sources, parsed.filter.granted)
        to_the_end = parsed.content is RangeContent.NET and parsed.until is None
        gone = lost(request)
        points = [
            await self.reads.until_gone(gone, database.resolved, point, exact, _slot_of(gone))
            if isinstance(point, AtTime)
            else point
            for point, exact in ((parsed.since, not to_the_end), (parsed.until, True))
        ]
        # "Everything at an scn" exists as soon as anything at it does.
        ahead = max((Position(p.scn, p.seq % SEQ_END) for p in points if p), default=ORIGIN)
        window = await self._target(database, ahead)
        since, until = (min(p, window) if p and p.seq == SEQ_END else p for p in points)
        until = until or window
        if since is not None and since > until:
            raise BadRequest(f"since={since} lies after until={until}", parameter="since")
        if parsed.content is RangeContent.STATE:
            database.require_seeded(parsed.filter.sources, parsed.filter.granted)
            database.require_whole(names, until)
        elif parsed.content is RangeContent.ALL:
            log_gaps.require_every_change(database.log, since, until)
        else:
            log_gaps.require_repaired(database.log, names, since or ORIGIN)
        return _Resolved(parsed.content, parsed.filter, names, since, until)

    async def _open(
        self, request: web.Request, database: StoredDatabase, parsed: BootstrapRequest
    ) -> BootstrapStream:
        if parsed.clock is not None:
            _check_clock(database, parsed.clock)
        names = database.require_sources(parsed.filter.sources, parsed.filter.granted)
        since = parsed.since
        if isinstance(since, AtTime):
            gone = lost(request)
            since = await self.reads.until_gone(
                gone, database.before_time, since.commit_us, _slot_of(gone)
            )
        since = ORIGIN if is_origin(since) else since
        position = parsed.resume.position if parsed.resume else since
        if is_origin(position):
            database.require_seeded(parsed.filter.sources, parsed.filter.granted)
        log_gaps.require_repaired(database.log, names, position)
        target = await self._target(database, position)
        piece_bytes = min(parsed.max_bytes or PIECE_BYTES, PIECE_BYTES)
        stream = BootstrapStream(
            store=database.store,
            log=database.log,
            since=since,
            target=target,
            stream_filter=parsed.filter,
            source_ids=database.source_ids(parsed.filter),
            resume=parsed.resume,
            piece_bytes=max(1, piece_bytes - CHECKPOINT_BYTES),
            retain=lambda retired_us: database.open_readers.retain(stream, retired_us),
        )
        return stream

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """Around the application's time: a reader that stalls is noted as open all the same."""
        renewing = asyncio.create_task(self._keep_renewing())
        yield
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        self.reads.close()

    async def _keep_renewing(self) -> None:
        for database in self.databases().values():
            # Thousands of schemas take seconds: not in the loop, at the first request.
            with contextlib.suppress(StoreError, FormatError):
                await asyncio.to_thread(database.log.schemas)
        while True:
            await asyncio.sleep(EVERY_S)
            for database in list(self._databases.values()):
                await self.reads.aside(database.open_readers.renew)

    async def _target(self, database: StoredDatabase, position: Position) -> Position:
        """The log's last window; a reader that is ahead of it waits a little.

        Raises:
            ServerUnavailable: the log writer is still behind the reader.
        """
        deadline_s = time.monotonic() + AHEAD_WAIT_S
        while (target := database.target_position()) < position:
            if time.monotonic() >= deadline_s:
                raise ServerUnavailable(
                    f"the log of {database.name} ends at {target}, before your {position}; "
                    "it catches up with the relay, or read from the relay instead",
                    target=target.to_json(),
                )
            await asyncio.sleep(AHEAD_POLL_S)
        return target


def _slot_of(gone: asyncio.Future[None]) -> FileSlot:
    """A slot whose reading ends when a reader has gone."""

    def check() -> None:
        if gone.done():
            raise ConnectionResetError("the reader has gone")

    return FileSlot(check)


def _check_clock(database: StoredDatabase, clock: str) -> None:
    ours = database.state().clock
    if clock != ours:
        raise ClockMismatch(
            f"the checkpoint belongs to the clock {clock}, the log of {database.name} to {ours}"
        )


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A range between positions, of the sources ``names``."""

    content: RangeContent
    filter: StreamFilter
    names: list[str]
    since: Position | None
    until: Position


def _opening(
    database: StoredDatabase,
    resolved: _Resolved,
    *,
    prefers_base: bool = False,
    retain: Retain | None = None,
) -> Callable[[Wanted], FrameRange]:
    """Plans the range, when it is called."""
    every_change = resolved.content is RangeContent.ALL
    if resolved.content is RangeContent.STATE:
        starts = state_from(resolved.until, database.origin(), prefers_base=prefers_base)
    else:
        starts = changes_from(resolved.since, every_change=every_change)

    def opening(may_open: Wanted) -> FrameRange:
        return FrameRange(
            database.store,
            database.log,
            starts,
            resolved.until,
            every_change=every_change,
            may_open=may_open,
            retain=retain,
        )

    return opening


def _range_stream(database: StoredDatabase, resolved: _Resolved, piece_bytes: int) -> RangeStream:
    def retain(retired_us: int) -> None:
        database.open_readers.retain(stream, retired_us)

    stream = RangeStream(
        database=database.name,
        clock=database.state().clock,
        since=resolved.since or ORIGIN,
        until=resolved.until,
        content=resolved.content,
        opening=_opening(database, resolved, retain=retain),
        stream_filter=resolved.filter,
        source_ids=database.source_ids(resolved.filter),
        piece_bytes=piece_bytes,
    )
    return stream


def bootstrap_app(
    config: BootstrapConfig, logs: OpenLogs | None = None, admission: Admission | None = None
) -> web.Application:
    """The application of a bootstrap server; without ``admission`` everyone may read."""
    guard = RequestGuard(config.listen, config.allowed_hosts)
    server = BootstrapServer(config, logs)
    app = make_app(server.routes(), guard)
    app.cleanup_ctx.append(server.running)
    if admission is not None:
        app[ADMISSION] = admission
    return app


async def serve_bootstrap(
    config: BootstrapConfig,
    listener: socket.socket,
    stop: asyncio.Event,
    logs: OpenLogs | None = None,
    http: HttpConfig | None = None,
    admission: Admission | None = None,
) -> None:
    """Serve until ``stop`` is set."""
    tls = server_tls(http.tls if http is not None else None)
    app = bootstrap_app(config, logs, admission)
    await serve(app, listener, stop, max_connections=config.max_connections, tls=tls)
