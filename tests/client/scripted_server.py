"""A server that speaks the protocol over frames in memory and fails where a test needs it.

It replaces a relay or a bootstrap server where the real one cannot be made to fail at a
chosen byte.  It has no ring and no filter.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

from databus.common.checkpoint import (
    ORIGIN,
    BootstrapCheckpoint,
    OnlineCheckpoint,
    Position,
    decode,
    encode,
)
from databus.common.errors import (
    ClockMismatch,
    DatabusError,
    LogTooYoung,
    ScnTooOld,
    to_problem,
)
from databus.common.frame.frame_format import Op, iter_frames, pack_frame
from databus.common.frame.window_builder import heartbeat
from databus.common.schema.source_schema import SourceSchema

CLOCK = "clock-a"


@dataclass(slots=True)
class Fault:
    """What goes wrong with one request: an error answer, or a cut after so many bytes."""

    error: DatabusError | None = None
    status: int | None = None
    cut_after_bytes: int | None = None
    end_after_bytes: int | None = None


@dataclass
class ScriptedServer:
    """Serves ``frames`` (one stream, in order) to every client.

    ``prev`` is the oldest position that is served.  Faults are used up one for each stream or
    bootstrap request.  With ``holds_open`` a follower's answer stays open at the end and gets
    what is appended later.
    """

    schemas: list[SourceSchema]
    frames: list[bytes] = field(default_factory=list)
    prev: Position = ORIGIN
    clock: str = CLOCK
    database: str = "shop"
    holds_open: bool = True
    heartbeat_s: float | None = None
    hidden_schemas: set[int] = field(default_factory=set)
    bootstrap_rows: list[bytes] = field(default_factory=list)
    bootstrap_target: Position = ORIGIN
    bootstrap_run: str = "run-1"
    bootstrap_every: int = 2
    bootstrap_since: Position | None = None
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._grown = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> ScriptedServer:
        app = web.Application()
        prefix = f"/v1/{self.database}"
        app.router.add_get(f"{prefix}/register", self._register)
        app.router.add_get(f"{prefix}/stream", self._stream)
        app.router.add_get(f"{prefix}/bootstrap", self._bootstrap)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            self._grown.set()
            await self._runner.cleanup()
            self._runner = None

    def append(self, *windows: bytes) -> None:
        self.frames.extend(
            bytes(frame.bytes) for window in windows for frame in iter_frames(window)
        )
        self._grown.set()

    def evict_to(self, scn: int) -> None:
        """Forget everything up to the end of ``scn``."""
        retained = [frame for frame in self.frames if _position(frame).scn > scn]
        gone = [frame for frame in self.frames if _position(frame).scn <= scn]
        self.frames = retained
        if gone:
            self.prev = _position(gone[-1])

    @property
    def newest(self) -> Position:
        return _position(self.frames[-1]) if self.frames else self.prev

    def streams(self) -> list[dict[str, str]]:
        return [query for path, query in self.requests if path == "stream"]

    def bootstraps(self) -> list[dict[str, str]]:
        return [query for path, query in self.requests if path == "bootstrap"]

    async def _register(self, request: web.Request) -> web.Response:
        self.requests.append(("register", dict(request.query)))
        schemas = [
            {
                "source": schema.source,
                "source_id": schema.source_id,
                "fingerprint": f"{schema.fingerprint:016x}",
                "version": 1,
                "schema": schema.to_json(),
            }
            for schema in self.schemas
            if schema.fingerprint not in self.hidden_schemas
        ]
        return web.json_response(
            {"database": self.database, "clock": self.clock, "schemas": schemas}
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.requests.append(("stream", query))
        fault = self.faults.pop(0) if self.faults else Fault()
        try:
            start = self._start_of(query)
        except DatabusError as error:
            return _problem(error)
        if fault.error is not None:
            return _problem(fault.error)
        if fault.status is not None:
            return web.Response(status=fault.status, text="no such luck")
        try:
            return await self._send(request, fault, start)
        except ConnectionResetError:  # the client has gone, as clients do
            return web.Response()

    def _start_of(self, query: dict[str, str]) -> Position:
        if query.get("start") == "latest":
            return self.newest
        if "checkpoint" in query:
            checkpoint = decode(query["checkpoint"])
            if checkpoint.clock != self.clock:
                raise ClockMismatch(f"{checkpoint.clock} is not {self.clock}")
            position = checkpoint.position
        elif "scn" in query:
            position = Position(int(query["scn"]))
        else:
            return self.prev
        if position < self.prev:
            raise ScnTooOld(f"{position} is older than {self.prev}")
        return position

    async def _send(
        self, request: web.Request, fault: Fault, start: Position
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Databus-Clock": self.clock,
                "Databus-Prev": f"{self.prev.scn}:{self.prev.seq}",
                "Databus-Max": f"{self.newest.scn}:{self.newest.seq}",
            }
        )
        await response.prepare(request)
        sent, position = 0, start
        limit = fault.cut_after_bytes if fault.end_after_bytes is None else fault.end_after_bytes
        while True:
            self._grown.clear()
            data = b"".join(frame for frame in self.frames if _position(frame) > position)
            if data:
                position = self.newest
            if limit is not None and sent + len(data) >= limit:
                await response.write(data[: limit - sent])
                if fault.end_after_bytes is None:
                    assert request.transport is not None
                    request.transport.abort()
                return response
            if data:
                await response.write(data)
                sent += len(data)
            if request.query.get("follow") != "true" or not self.holds_open:
                return response
            if self._runner is None:
                return response
            try:
                async with asyncio.timeout(self.heartbeat_s):
                    await self._grown.wait()
            except TimeoutError:
                await response.write(heartbeat(position, 0))

    async def _bootstrap(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.requests.append(("bootstrap", query))
        fault = self.faults.pop(0) if self.faults else Fault()
        if fault.error is not None:
            return _problem(fault.error)
        since, row = Position(0, 0), 0
        if "checkpoint" in query:
            checkpoint = decode(query["checkpoint"])
            since = checkpoint.position
            if isinstance(checkpoint, BootstrapCheckpoint):
                since = checkpoint.since
                if checkpoint.run == self.bootstrap_run:
                    row = checkpoint.row
        if self.bootstrap_since is not None and since < self.bootstrap_since:
            return _problem(LogTooYoung(f"{since} is before {self.bootstrap_since}"))
        response = web.StreamResponse(headers={"Databus-Clock": self.clock})
        await response.prepare(request)
        data = self._bootstrap_body(since, row)
        if fault.cut_after_bytes is not None:
            await response.write(data[: fault.cut_after_bytes])
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(data)
        return response

    def _bootstrap_body(self, since: Position, row: int) -> bytes:
        out = []
        rows = self.bootstrap_rows
        for index in range(row, len(rows)):
            out.append(rows[index])
            if (index + 1) % self.bootstrap_every == 0 and index + 1 < len(rows):
                out.append(self._checkpoint_frame(since, index + 1))
        target = OnlineCheckpoint(self.database, self.clock, self.bootstrap_target)
        out.append(checkpoint_frame(encode(target), self.bootstrap_target))
        return b"".join(out)

    def _checkpoint_frame(self, since: Position, row: int) -> bytes:
        checkpoint = BootstrapCheckpoint(
            self.database,
            self.clock,
            since=since,
            target=self.bootstrap_target,
            run=self.bootstrap_run,
            row=row,
            position=since,
        )
        return checkpoint_frame(encode(checkpoint), since)


def checkpoint_frame(text: str, position: Position) -> bytes:
    return pack_frame(op=Op.CHECKPOINT, scn=position.scn, seq=position.seq, after=text.encode())


def _position(frame: bytes) -> Position:
    return next(iter(iter_frames(frame))).position


def _problem(error: DatabusError) -> web.Response:
    return web.json_response(
        to_problem(error), status=error.status, content_type="application/problem+json"
    )
