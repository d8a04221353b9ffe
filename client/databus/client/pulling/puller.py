"""The task that pulls frames: makes the machine's steps and passes blocks to a sink."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import NoReturn, Protocol, Self

from databus.client.application.frame_blocks import Block
from databus.client.application.options import Options
from databus.client.pulling.discovery import relays_of
from databus.client.pulling.pull_machine import (
    Machine,
    PullOutcome,
    PullStep,
    Resume,
    State,
    UnresolvedStart,
    outcome_of,
)
from databus.client.pulling.transport import ResponseBody, Transport
from databus.common.checkpoint import (
    After,
    AtTime,
    BootstrapCheckpoint,
    Checkpoint,
    Latest,
    Oldest,
    OnlineCheckpoint,
    Position,
    decode,
    decode_position,
    encode,
)
from databus.common.errors import (
    DatabusError,
    FormatError,
    InternalError,
    ServerUnavailable,
    UnknownSchema,
    WindowMissing,
)
from databus.common.frame.frame_format import FrameSplitter, Op
from databus.common.frame.spans import SpanSplitter
from databus.common.schema.source_schema import SchemaSet, SourceSchema
from databus.common.table_state import TableState

log = logging.getLogger("databus.client")


@dataclass(frozen=True, slots=True)
class Subscription:
    """What is read: a database, globs over its sources, and server-side filters."""

    database: str
    sources: tuple[str, ...] = ()
    ops: str | None = None
    partition: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it has no filter, so that every window must arrive."""
        return not (self.sources or self.ops or self.partition)

    def query(self) -> dict[str, str]:
        """The subscription as request parameters."""
        query = {}
        if self.sources:
            query["sources"] = ",".join(self.sources)
        if self.ops:
            query["ops"] = self.ops
        if self.partition:
            query["partition"] = self.partition
        return query


class FrameSink(Protocol):
    """Where pulled frames go."""

    @property
    def replays(self) -> bool:
        """Whether an incomplete window is replayed from its start when another server takes over.

        Otherwise it continues in the middle, which needs servers with the same sources.
        """

    async def put(self, block: Block) -> None:
        """Take a block, waiting until there is room."""

    def report(self, states: Sequence[TableState]) -> None:
        """A server has reported the tables that are not followed."""

    def cut(self, frame_count: int) -> None:
        """Discard all frames but the first ``frame_count``: they will come again."""


@dataclass(slots=True)
class PullStats:
    """Counters and gauges of one puller."""

    mode: str = "starting"
    server: str = ""
    newest: Position | None = None
    is_ahead: bool = False
    """The relay has not reached our position: no data now means that the relay lags."""
    is_flowing: bool = False
    """An answer of a relay is open: no data means that there are no new events."""
    frame_count: int = 0
    failure_count: int = 0
    last_error: str = ""


@dataclass(kw_only=True, eq=False)
class Puller:
    """Reads one stream into a sink, from the servers that the machine chooses.

    Invariants:
        I1. Frames of a relay reach the sink with growing positions, each once; after a
            ``cut`` they begin again just after it.
        I2. Every row's schema is in ``schemas`` before the row reaches the sink.
        I3. The machine's resume position is never ahead of what the sink has.

    Owner: one task, that runs ``run``.
    Raises: from ``run``: the error with which the machine stopped.
    """

    subscription: Subscription
    machine: Machine
    transport: Transport
    sink: FrameSink
    schemas: SchemaSet
    options: Options
    stats: PullStats
    first_frame: InitVar[int] = 0

    def __post_init__(self, first_frame: int) -> None:
        self._frame_count = first_frame
        # The point for a replay if the window that is being read breaks off.
        self._mark = first_frame
        self._mark_resume: Resume = self.machine.resume
        self.origin: Resume = self.machine.resume
        """Where this stream began: a position, once a relay has resolved "latest"."""
        self._in_window = False
        self._window_server = ""
        # In a bootstrap: the frames after the mark that come again, and the last one of them.
        self._again = 0
        self._last: Position | None = None

    async def run(self) -> NoReturn:
        """Pull until cancelled or until the machine stops."""
        while True:
            step = self.machine.next()
            if step.state is State.STOPPED:
                raise self.machine.error or InternalError("the machine stopped without an error")
            if step.wait_s:
                await asyncio.sleep(step.wait_s)
            self.stats.server = str(step.server)
            try:
                outcome = await self._perform(step)
                self._note_end(outcome)
                self.machine.report(outcome)
            except DatabusError as error:
                self.stats.failure_count += 1
                self.stats.is_flowing = False
                self.stats.last_error = f"{error.code}: {error.message}"
                outcome = outcome_of(error)
                verb = self.machine.report(outcome, error)
                log.warning("%s at %s: %s; %s", step.state, step.server, error.message, verb)

    def _note_end(self, outcome: PullOutcome) -> None:
        # After an answer in pieces the next request follows at once, so the stream still flows.
        self.stats.is_flowing = self.stats.mode == "relay" and outcome in (
            PullOutcome.ENDED,
            PullOutcome.QUIET,
        )

    async def _perform(self, step: PullStep) -> PullOutcome:
        if step.state is State.REGISTER and self.options.discover:
            await self._register(await self._discovered(step.server))
            return PullOutcome.OK
        if step.state in (State.REGISTER, State.REGISTER_BOOTSTRAP):
            await self._register(step.server)
            return PullOutcome.OK
        if step.state is State.STREAM:
            self.stats.mode = "relay"
            return await self._stream(step)
        self.stats.mode = "bootstrap"
        return await self._bootstrap(step)

    async def _discovered(self, server: str) -> str:
        """The relay to read, by the routing table that ``server`` has."""
        table = await self.transport.get_json(server, "/v1/cluster", {})
        rng = random.Random(self.options.seed)
        self.machine.know_relays(
            relays_of(table, self.subscription.database, self.options.zone, rng)
        )
        self.stats.server = self.machine.next().server
        return self.stats.server

    async def _register(self, server: str) -> None:
        subscription = self.subscription
        answer = await self.transport.register(server, subscription.database, subscription.sources)
        self.machine.met_clock(answer.clock)
        for schema in answer.schemas:
            self.schemas.announce(schema)
        if answer.tables is not None:
            self.sink.report(answer.tables)

    async def _stream(self, step: PullStep) -> PullOutcome:
        resume = self._begin(step)
        options = self.options
        query = self.subscription.query() | _start_query(self._dated(resume))
        if options.follow:
            query["follow"] = "true"
        else:
            query["wait_ms"] = str(options.wait_ms)
        if options.max_bytes is not None:
            query["max_bytes"] = str(options.max_bytes)
        path = f"/v1/{self.subscription.database}/stream"
        async with self.transport.stream(step.server, path, query) as body:
            self._opened(body)
            self.stats.is_flowing = True
            self._note_ahead(step.server, body)
            if isinstance(resume, UnresolvedStart):
                self._pin(resume, body)
            before = self.machine.resume
            splitter = SpanSplitter()
            while (chunks := await body.read_bulk())[0]:
                for data, columns in splitter.feed_columns(*chunks):
                    block = Block(data, columns, first=self._frame_count, bootstrap=False)
                    await self._take(step.server, block)
            _check_whole(step.server, splitter)
        is_quiet = not options.follow and self.machine.resume == before
        return PullOutcome.QUIET if is_quiet else PullOutcome.ENDED

    async def _bootstrap(self, step: PullStep) -> PullOutcome:
        resume = self._begin(step)
        query = self.subscription.query() | _start_query(self._dated(resume))
        if self.options.max_bytes is not None:
            query["max_bytes"] = str(self.options.max_bytes)
        path = f"/v1/{self.subscription.database}/bootstrap"
        async with self.transport.stream(step.server, path, query) as body:
            self._opened(body)
            if isinstance(self.origin, AtTime) and body.start is not None:
                self.origin = self._online(body.start)
            splitter = FrameSplitter()
            is_first = True
            while chunk := await body.read():
                data: bytes | memoryview = splitter.feed(chunk)
                if data and self._again:
                    data, is_first = self._continued(step.server, data, is_first=is_first), False
                if data and await self._take_bootstrap(step.server, data):
                    return PullOutcome.TARGET
            _check_whole(step.server, splitter)
        return PullOutcome.ENDED

    def _begin(self, step: PullStep) -> Resume:
        """Where the request starts; at the window's start if another server continues."""
        bootstrap = step.state is State.BOOTSTRAP
        moved = step.server != self._window_server
        self._again = 0
        if self._in_window and bootstrap and isinstance(self._mark_resume, BootstrapCheckpoint):
            # The sink retains them: ``_continued`` discards what comes again.
            self._again = self._frame_count - self._mark
        elif self._in_window and (bootstrap or (moved and self.sink.replays)):
            self._rewind()
        self._window_server = step.server
        return self.machine.resume

    def _rewind(self) -> None:
        if self.sink.replays:
            self.sink.cut(self._mark)
            self._frame_count = self._mark
            self.machine.go_back(self._mark_resume)
        self._in_window = False

    def _dated(self, resume: Resume) -> Resume:
        """A bare position with the clock that the server has just reported."""
        clock = self.machine.clock
        if isinstance(resume, After) and clock is not None and resume.position.scn:
            return OnlineCheckpoint(self.subscription.database, clock, resume.position)
        return resume

    def _opened(self, body: ResponseBody) -> None:
        if body.clock is not None:
            self.machine.met_clock(body.clock)
        self.machine.met_epoch(body.epoch)
        self.stats.newest = body.newest

    def _note_ahead(self, server: str, body: ResponseBody) -> None:
        if body.is_ahead and not self.stats.is_ahead:
            log.warning(
                "%s has the stream up to %s only, and our position is after that: waiting for "
                "newer events",
                server,
                body.newest,
            )
        self.stats.is_ahead = body.is_ahead

    def _pin(self, resume: UnresolvedStart, body: ResponseBody) -> None:
        """Replace the start by its present position, for the next request."""
        if isinstance(resume, AtTime):
            position = body.start
        else:
            position = body.prev if isinstance(resume, Oldest) else body.newest
        if position is not None and self.machine.clock is not None:
            self.machine.pin(self._online(position))
            self._mark_resume = self.origin = self.machine.resume

    def _online(self, position: Position) -> OnlineCheckpoint:
        return OnlineCheckpoint(self.subscription.database, self.machine.clock or "", position)

    async def _take(self, server: str, block: Block) -> None:
        """Pass the new frames among some frames of a relay to the sink."""
        block.raise_error_frame()
        resume = self.machine.resume
        if self.subscription.is_whole and not isinstance(resume, UnresolvedStart):
            try:
                block.require_chain(resume.position)
            except WindowMissing as error:
                # The frames before the gap are good.
                count = block.index_after(decode_position(error.details["after"]))
                if 0 < count < block.count:
                    good = block.data[: block.offsets[count]]
                    await self._take(server, Block(good, first=self._frame_count, bootstrap=False))
                raise
        last = block.single_frame(block.count - 1).position
        if self.stats.is_ahead and _is_behind(resume, last):
            self.stats.is_ahead = False
        if (
            not isinstance(resume, UnresolvedStart)
            and block.single_frame(0).position <= resume.position
        ):
            fresh = block.index_after(resume.position)
            if fresh == block.count and not self._is_first_sign(block, resume.position):
                return
            fresh = min(fresh, block.count - 1)
            rest = block.frames_from(fresh)
            block = Block(rest, first=self._frame_count, bootstrap=False)
        await self._learn_schemas(server, block)
        if self.stats.newest is None or last > self.stats.newest:
            self.stats.newest = last
        await self._hand_on(block)
        # After the sink has it: if this is cancelled while it waits, the block comes again.
        self.machine.advanced(self._online(last))
        self._note_window_end(block)

    def _is_first_sign(self, block: Block, position: Position) -> bool:
        """Whether the block is the first one and only confirms the start position.

        It lets the consumer take a checkpoint of its start.  Without one, a start at the latest
        event would be at another position after a crash.
        """
        last = block.count - 1
        is_here = block.ops[last] == Op.HEARTBEAT and block.position(last) == position
        return is_here and self._frame_count == 0

    def _note_window_end(self, block: Block) -> None:
        end = block.last_of(Op.END_OF_WINDOW)
        row_after = block.has_row_from(end + 1)
        if end >= 0:
            self._in_window = False
        if row_after:
            self._in_window = True
            if end < 0:
                return
        else:
            end = end if self._in_window else block.count - 1
        if end >= 0:
            self._mark = block.first + end + 1
            self._mark_resume = self._online(block.single_frame(end).position)

    def _continued(
        self, server: str, data: bytes | memoryview, *, is_first: bool
    ) -> bytes | memoryview:
        """What is new in an answer of which the sink has the beginning.

        An answer begins with the requested checkpoint if it continues there, and then has the same
        frames in the same order.  Otherwise they are cut, and come again.
        """
        block = Block(data, first=self._frame_count, bootstrap=True)
        block.raise_error_frame()
        if is_first and not _is_at(block, self._mark_resume):
            self._rewind()
            self._again = 0
            return data
        begin = int(is_first)
        end = min(begin + self._again, block.count)
        self._again -= end - begin
        is_other = bool((block.op_column[begin:end] == Op.CHECKPOINT).any())
        if is_other or (not self._again and block.position(end - 1) != self._last):
            self._rewind()
            raise ServerUnavailable(f"{server} sent other rows after a checkpoint than before")
        return block.frames_from(end)

    async def _take_bootstrap(self, server: str, data: bytes | memoryview) -> bool:
        """Pass frames of a bootstrap to the sink; True when its target has arrived."""
        block = Block(data, first=self._frame_count, bootstrap=True)
        block.raise_error_frame()
        await self._learn_schemas(server, block)
        checkpoints = [
            decode(bytes(block.frame(index).after or b"")) for index in block.all_of(Op.CHECKPOINT)
        ]
        await self._hand_on(block)
        self._in_window, self._last = True, block.position(block.count - 1)
        if not checkpoints:
            return False
        last = checkpoints[-1]
        self.machine.met_clock(last.clock)
        self.machine.advanced(last)
        index = block.last_of(Op.CHECKPOINT)
        self._mark, self._mark_resume = block.first + index + 1, last
        self._in_window = index + 1 < block.count
        if isinstance(last, BootstrapCheckpoint):
            self.stats.newest = last.target
            return False
        return True

    async def _hand_on(self, block: Block) -> None:
        await self.sink.put(block)
        self._frame_count += block.count
        self.stats.frame_count += block.count

    async def _learn_schemas(self, server: str, block: Block) -> None:
        for index in block.all_of(Op.SCHEMA_CHANGE):
            after = block.frame(index).after
            if after is not None:
                self.schemas.announce(_schema_of(bytes(after)))
        missing = [fp for fp in block.row_schemas() if fp not in self.schemas]
        if not missing:
            return
        await self._register(server)
        for fingerprint in missing:
            if fingerprint not in self.schemas:
                raise UnknownSchema(
                    f"{server} sent rows of schema {fingerprint:016x} and does not list it "
                    f"among the {len(self.schemas)} of database {self.subscription.database}"
                )


def _schema_of(data: bytes) -> SourceSchema:
    try:
        return SourceSchema.from_json(json.loads(data))
    except (ValueError, TypeError) as error:
        raise FormatError(f"a schema change has no schema: {error}") from error


def _start_query(resume: Resume) -> dict[str, str]:
    """The start point as request parameters."""
    if isinstance(resume, Oldest):
        return {"start": "oldest"}
    if isinstance(resume, Latest):
        return {"start": "latest"}
    if isinstance(resume, AtTime):
        return {"start_time": str(resume.commit_us)}
    if isinstance(resume, After):
        return {"scn": str(resume.position.scn)}
    return {"checkpoint": encode(resume)}


def _is_behind(resume: Resume, position: Position) -> bool:
    """Whether a frame at ``position`` is new to a reader that resumes at ``resume``."""
    return isinstance(resume, UnresolvedStart) or position > resume.position


def _is_at(block: Block, resume: Resume) -> bool:
    """Whether a bootstrap begins where it was requested: at the same row of the same run."""
    if block.ops[0] != Op.CHECKPOINT or not isinstance(resume, BootstrapCheckpoint):
        return False
    found = decode(bytes(block.frame(0).after or b""))
    return isinstance(found, BootstrapCheckpoint) and (found.run, found.row, found.position) == (
        resume.run,
        resume.row,
        resume.position,
    )


def _check_whole(server: str, splitter: FrameSplitter | SpanSplitter) -> None:
    if splitter.pending_bytes:
        raise ServerUnavailable(
            f"{server} ended its answer within a frame, {splitter.pending_bytes} bytes into it"
        )


class Pull:
    """A puller as a task that can be ended and restarted at another position, over one transport.

    Owner: the event loop that entered it.
    """

    def __init__(
        self,
        subscription: Subscription,
        machine: Machine,
        sink: FrameSink,
        schemas: SchemaSet,
        options: Options,
    ) -> None:
        self.machine = machine
        self.stats = PullStats()
        self._transport = Transport(
            connect_timeout_s=options.connect_timeout_s,
            answer_timeout_s=options.answer_timeout_s,
            silence_timeout_s=options.silence_timeout_s,
            read_bytes=min(1 << 19, max(1 << 14, options.buffer_bytes // 8)),
            client_name=options.client_name,
            credentials=options.credentials,
        )
        self._new_puller = partial(
            Puller,
            subscription=subscription,
            machine=machine,
            transport=self._transport,
            sink=sink,
            schemas=schemas,
            options=options,
            stats=self.stats,
        )
        self._puller: Puller | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()
        await self._transport.close()

    @property
    def pulling(self) -> asyncio.Task[None]:
        """The running task."""
        assert self._task is not None
        return self._task

    @property
    def origin(self) -> Resume:
        """Where this pull began."""
        assert self._puller is not None
        return self._puller.origin

    @property
    def origin_checkpoint(self) -> Checkpoint | None:
        """Where this pull began, as a checkpoint; None until a server has reported it."""
        origin, clock = self.origin, self.machine.clock
        if isinstance(origin, After) and clock is not None:
            return OnlineCheckpoint(self.machine.database, clock, origin.position)
        return origin if isinstance(origin, OnlineCheckpoint | BootstrapCheckpoint) else None

    def begin(self, resume: Resume, first_frame: int) -> asyncio.Task[None]:
        """Pull from ``resume`` on; frames are counted from ``first_frame``."""
        self.machine.restart(resume)
        self._puller = self._new_puller(first_frame=first_frame)
        self._task = asyncio.create_task(self._puller.run(), name="databus-puller")
        return self._task

    async def resolved(self) -> tuple[Position, int] | None:
        """A position and a time: all that was committed before it is at or before the position.

        None in a bootstrap, and where the relay does not know.
        """
        if self.stats.mode != "relay":
            return None
        found = await self._transport.get_json(self.stats.server, "/v1/databases", {})
        for one in found["databases"]:
            if one.get("name") == self.machine.database and one.get("clock") == self.machine.clock:
                at_us = one.get("resolved_us")
                return None if at_us is None else (decode_position(one["max"]), int(at_us))
        return None

    async def end(self) -> None:
        """Stop pulling; the connection is closed when this returns."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
