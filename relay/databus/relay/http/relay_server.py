"""The relay's HTTP worker: its application, and the process around it.

Workers share nothing but the files of the data folder, which they only read: any number of
them may listen at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from databus.common.access.listener_tls import server_tls
from databus.common.access_config import AuthConfig
from databus.common.config import Config, DatabaseConfig, RelayConfig
from databus.common.errors import ConfigError, DatabusError, ScnTooOld, UnknownDatabase
from databus.common.filters.stream_filter import parse_sources
from databus.common.http.admission import ADMISSION, Admission, granted
from databus.common.http.endpoint_routes import Operations, routes_of
from databus.common.http.http_application import (
    json_response,
    make_app,
    query_of,
    serve,
)
from databus.common.http.openapi_document import version
from databus.common.http.request_guard import RequestGuard
from databus.common.http.status_page import status_page
from databus.common.private import keep_files_private
from databus.common.processes.loading import loading
from databus.common.processes.server_log import log_to_stderr
from databus.common.spelling import nearest
from databus.relay.cluster.routing_table import read_table
from databus.relay.columns import column_kernels
from databus.relay.http import relay_endpoints
from databus.relay.http.dump_proxy import pass_on
from databus.relay.http.relay_metrics import RelayCollector
from databus.relay.processes.process_handover import Handover, take_over
from databus.relay.processes.wakeup import WakeupReceiver
from databus.relay.processes.worker_channel import WorkerChannel
from databus.relay.ring.data_folder import DatabaseFolder
from databus.relay.serving.counters.client_counters import ClientCounters, read_clients
from databus.relay.serving.counters.worker_counters import WorkerCounters, read_counters
from databus.relay.serving.database_view import DatabaseView
from databus.relay.serving.stream_cursor import warm_up
from databus.relay.serving.stream_request import (
    parse_columns,
    parse_stream_request,
)
from databus.relay.serving.stream_sender import StreamSender

SERVER: web.AppKey[RelayServer] = web.AppKey("databus_relay_server")


class RelayServer:
    """The handlers of one worker.

    Invariants:
        I1. The worker writes nothing of a database; its fetcher may die and come back.

    Owner: one event loop, in which it was made.
    """

    def __init__(self, config: Config, worker: int, wakeups: Mapping[str, int]) -> None:
        if config.relay is None:
            raise ConfigError("the configuration has no [relay] section")
        self.config: RelayConfig = config.relay
        self.worker = worker
        self._relay_name = config.cluster.relay if config.cluster is not None else None
        self.admission = Admission(config.auth)
        self.started_s = time.time()
        self.databases = {
            database.name: DatabaseView(
                database,
                DatabaseFolder.of(self.config.data_dir, database.name),
                WakeupReceiver(wakeups[database.name]),
            )
            for database in config.database
        }
        self.counters = WorkerCounters(self.config.data_dir, worker, list(self.databases))
        self.clients = ClientCounters(self.config.data_dir, worker)
        self.sender = StreamSender(self.config, self.counters)
        self.registry = CollectorRegistry()
        self.registry.register(
            RelayCollector(self.config.data_dir, self.config.workers, self.databases.values())
        )

    def close(self) -> None:
        """Close all files and descriptors."""
        for database in self.databases.values():
            database.close()
        self.counters.close()
        self.clients.close()

    def add(self, database: DatabaseConfig, wakeup_fd: int = -1) -> None:
        """Serve one more database, or, without a wake-up, a known one as configured now."""
        known = self.databases.get(database.name)
        if known is not None:
            known.config = database
            return
        self.counters.add_database(database.name)
        self.databases[database.name] = DatabaseView(
            database,
            DatabaseFolder.of(self.config.data_dir, database.name),
            WakeupReceiver(wakeup_fd),
        )

    def set_auth(self, auth: AuthConfig) -> None:
        """Decide by other callers and grants from now on."""
        self.admission.configure(auth)

    def remove(self, name: str) -> None:
        """Serve a database no longer; its readers are notified at once."""
        database = self.databases.pop(name, None)
        if database is not None:
            database.retire()

    def routes(self) -> Iterator[web.RouteDef]:
        """The worker's routes."""
        operations = Operations(
            registry=self.registry,
            openapi=relay_endpoints.document(),
            missing=self.missing,
            page=status_page("Databus relay", "databus.relay.http"),
        )
        return routes_of(relay_endpoints.ENDPOINTS, self, operations)

    def missing(self) -> list[str]:
        """Why the relay is not ready.

        A database that cannot be captured does not make the others unready.
        """
        elsewhere = self._served_elsewhere()
        waiting = {
            database.name: database.fetcher_state().name
            for database in self.databases.values()
            if not database.is_ready and database.name not in elsewhere
        }
        if len(waiting) < len(self.databases):
            waiting = {name: state for name, state in waiting.items() if state != "failed"}
        return [
            f"the fetcher of {name} has not opened its source yet (state {state})"
            for name, state in waiting.items()
        ]

    def _served_elsewhere(self) -> set[str]:
        """In a cluster: the databases that other relays serve, and this one does not."""
        if self._relay_name is None:
            return set()
        try:
            databases = read_table(self.config.data_dir)["databases"]
        except DatabusError:
            return set()
        return {
            one["name"]
            for one in databases
            if self._relay_name not in [relay["relay"] for relay in one["relays"]]
        }

    def _database(self, request: web.Request) -> DatabaseView:
        name = request.match_info["db"]
        database = self.databases.get(name)
        if database is None:
            raise UnknownDatabase(
                f"there is no database {name!r} here{nearest(name, self.databases)}",
                database=name,
            )
        return database

    async def answer_databases(self, request: web.Request) -> web.Response:
        """GET /v1/databases"""
        query_of(request)
        access = granted(request)
        return json_response(
            {
                "databases": [
                    database.range_document()
                    if database.is_ready
                    else {"name": database.name, "state": database.fetcher_state().name}
                    for database in self.databases.values()
                    if access.has_database(database.name)
                ]
            }
        )

    async def answer_cluster(self, request: web.Request) -> web.Response:
        """GET /v1/cluster"""
        query_of(request)
        access = granted(request)
        table = read_table(self.config.data_dir)
        shown = [one for one in table["databases"] if access.has_database(one["name"])]
        return json_response({**table, "databases": shown})

    async def answer_sources(self, request: web.Request) -> web.Response:
        """GET /v1/{db}/sources"""
        query_of(request)
        database = self._database(request)
        access = granted(request)
        listed = [one for one in database.sources_document() if access.has_source(one["name"])]
        return json_response({**database.range_document(), "sources": listed})

    async def answer_register(self, request: web.Request) -> web.Response:
        """GET /v1/{db}/register"""
        query = query_of(request)
        database = self._database(request)
        patterns = parse_sources(query["sources"]) if "sources" in query else ()
        return json_response(
            database.register_document(patterns, parse_columns(query), granted(request))
        )

    async def answer_stream(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/{db}/stream"""
        database = self._database(request)
        self.counters.add(database.name, "requests")
        try:
            query = query_of(request)
            parsed = parse_stream_request(query, request.headers, database.name, granted(request))
            with (
                database.answering(),
                self.clients.answering(database.name, parsed.client) as client,
            ):
                return await self.sender.send(request, database, parsed, client)
        except DatabusError as error:
            self.counters.add(database.name, "errors")
            if isinstance(error, ScnTooOld):
                self.counters.add(database.name, "too_old")
            raise

    async def pass_on(self, request: web.Request) -> web.Response:
        """The answer of the database's fetcher."""
        query_of(request)
        return await pass_on(request, self._database(request))

    async def answer_status(self, request: web.Request) -> web.Response:
        """GET /v1/status"""
        query_of(request)
        return json_response(self.status_document())

    def status_document(self) -> dict[str, Any]:
        """The state of everything, as this worker sees it."""
        return {
            "version": version(),
            "now_us": time.time_ns() // 1000,
            "worker": self.worker,
            "workers": self.config.workers,
            "uptime_s": round(time.time() - self.started_s, 3),
            "databases": [self._database_status(d) for d in self.databases.values()],
        }

    def _database_status(self, database: DatabaseView) -> dict[str, Any]:
        fetcher = database.fetcher_state()
        document: dict[str, Any] = {"name": database.name, "state": fetcher.name}
        if database.is_ready:
            document = database.range_document()
            state = database.ring.snapshot()
            document["ring"] = {
                "capacity_bytes": database.ring.ring_bytes,
                "used_bytes": state.tail - state.head,
                "written_bytes": state.tail,
                "frames": state.frames - state.evicted_frames,
                "windows": state.windows - state.evicted_windows,
                "frames_ever": state.frames,
                "windows_ever": state.windows,
            }
        document["url"] = str(database.config.url)
        document["served"] = read_counters(self.config.data_dir, self.config.workers, database.name)
        clients = read_clients(self.config.data_dir, self.config.workers, database.name)
        newest_us = document.get("max_commit_us", 0)
        document["clients"] = [
            {"name": name, **client.to_json(newest_us)} for name, client in clients.items()
        ]
        document["dumps"] = database.dumps_document()
        document["tables"] = database.tables_not_followed(())
        document["fetcher"] = {**fetcher.document, "age_s": round(fetcher.age_s, 3)}
        return document


def make_relay_app(
    config: Config, *, worker: int = 0, wakeups: Mapping[str, int]
) -> web.Application:
    """The application of one worker; ``wakeups`` has an eventfd for each database.

    To be called in the event loop that runs it.
    """
    server = RelayServer(config, worker, wakeups)
    guard = RequestGuard(server.config.listen, server.config.allowed_hosts)
    app = make_app(server.routes(), guard)
    app[SERVER] = server
    app[ADMISSION] = server.admission

    async def wake_readers(_: web.Application) -> None:
        for database in server.databases.values():
            database.wakeup.close()

    async def close(_: web.Application) -> None:
        server.close()

    app.on_shutdown.append(wake_readers)
    app.on_cleanup.append(close)
    return app


async def run_worker(handover: Handover) -> None:
    """Serve until SIGTERM, then end open answers and return."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    app = make_relay_app(handover.config, worker=handover.worker, wakeups=handover.wakeups)
    with WorkerChannel(handover.channel_fd, app[SERVER]):
        await serve(
            app,
            handover.listening_socket(),
            stop,
            max_connections=app[SERVER].config.max_connections,
            tls=server_tls(handover.config.http.tls),
        )


def allow_connections() -> None:
    """Raise the limit of open descriptors to the maximum: a connection takes one or two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(arguments: list[str] | None = None) -> None:
    """The worker's process; the supervisor starts it with a handover."""
    import uvloop

    keep_files_private()
    log_to_stderr()
    handover = take_over(sys.argv[1:] if arguments is None else arguments)
    allow_connections()
    with loading():
        warm_up()
        column_kernels.warm_up()
    uvloop.run(run_worker(handover))


if __name__ == "__main__":
    main()
