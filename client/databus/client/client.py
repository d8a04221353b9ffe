"""The client: one subscription to one database, at whichever server holds its events."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import inspect
import logging
import random
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Iterable,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Literal, Self, Unpack

from databus.client.application.consumer import Consumer
from databus.client.application.events import Decoding
from databus.client.application.options import OptionFields, parse_options
from databus.client.application.signal_stops import run_until_signal
from databus.client.checkpoints.checkpoint_stores import (
    ApplicationCheckpoints,
    CheckpointStore,
    NoCheckpoints,
)
from databus.client.checkpoints.database_checkpoints import (
    AsyncpgCheckpoints,
    DatabaseCheckpoints,
)
from databus.client.deadletters.dead_letter_stores import DeadLetterStore
from databus.client.deadletters.held_events import HeldEvents
from databus.client.delivery.consumer_calls import Delivery
from databus.client.delivery.dead_letter_replay import DeadLetterReplay, Replayed
from databus.client.delivery.dispatcher import Dispatcher
from databus.client.delivery.pulled_windows import (
    AsyncPulledWindow,
    AsyncWindows,
    Windows,
)
from databus.client.delivery.steering import Steering, Stream
from databus.client.delivery.window_reader import NewWindow, W, WindowReader
from databus.client.pulling.pull_machine import Machine, Resume, first_resume, seek_target
from databus.client.pulling.puller import FrameSink, Pull, PullStats, Subscription
from databus.client.pulling.raw_windows import RawSink, RawWindows, read_raw
from databus.client.pulling.replay_buffer import ReplayBuffer
from databus.common.checkpoint import Checkpoint, Position
from databus.common.errors import BadCheckpoint, ConfigError
from databus.common.filters.stream_filter import parse_ops, parse_partition, parse_sources
from databus.common.private import HiddenUrl
from databus.common.schema.source_schema import SchemaSet

log = logging.getLogger("databus.client")

StartWord = Literal["bootstrap", "oldest", "latest"]
SeekTarget = int | Position | dt.datetime | Checkpoint
Start = StartWord | SeekTarget


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a client."""

    mode: str
    """Where frames come from: ``starting``, ``relay`` or ``bootstrap``."""
    server: str
    """URL of the server that the client reads."""
    position: Position | None
    """Position of the last window that was delivered."""
    checkpoint: Checkpoint | None
    """The last stored checkpoint."""
    newest: Position | None
    """The newest position that a server has reported; in a bootstrap, the target."""
    event_count: int
    """Events delivered."""
    window_count: int
    """Windows delivered."""
    rollback_count: int
    """Rollbacks."""
    bootstrap_count: int
    """Bootstraps started."""
    gap_count: int
    """Gaps that were accepted with ``on_gap``."""
    failure_count: int
    """Failed requests."""
    last_error: str
    """The last error of a server; empty if there was none."""
    lag_s: float | None
    """Seconds since the commit of the oldest event that was received and is not delivered; 0 if
    everything up to ``newest`` is delivered.  None in a bootstrap, and where it is not known."""
    lag_windows: int
    """Windows that were received, whole or in part, and are not delivered."""
    buffered_bytes: int
    """Bytes that are received and not yet delivered."""
    is_flowing: bool
    """Whether an answer of a relay is open; no data then means that there are no new events."""
    is_ahead: bool
    """Whether the relay has not yet reached the position of the client."""
    is_paused: bool
    """Whether ``pause`` holds the client."""


class DatabusClient:
    """Reads the committed changes of ``sources`` of ``database``, in commit order.

    ``relays`` and ``bootstraps`` are base URLs.  ``sources`` are globs over source names.
    ``start`` is where a client without a stored checkpoint starts: ``"bootstrap"`` (the whole
    tables first; ``"oldest"`` if no bootstrap server is given), ``"oldest"``, ``"latest"``, an SCN
    (the first event after it), a commit time (a ``datetime`` with a zone: the first window
    committed then or later), or a checkpoint.  The servers apply the filters ``partition`` and
    ``ops``.  All other settings are in ``Options``.

    If the relays no longer have a commit time, the client reads a bootstrap server, which sends
    what has changed since.  Without a bootstrap server the client raises ``ScnTooOld``, or follows
    ``on_gap``.  If everything was committed before the time, the client starts with the next event.

    ``with`` and ``async with`` end what the client still runs.

    There are three ways to consume, one at a time: callbacks (``run``, ``serve``), an iterator over
    windows (``windows``, ``awindows``), and undecoded frames (``raw_windows``).

    Owner: one event loop, or one thread that calls ``run`` or ``windows``; ``stop``, ``pause``,
    ``resume``, ``seek`` and ``status`` may be called from anywhere.
    Raises: ConfigError for an argument that is not of its form.
    """

    def __init__(
        self,
        *,
        database: str,
        relays: Sequence[str],
        sources: Iterable[str] = (),
        bootstraps: Sequence[str] = (),
        consumer: Consumer | None = None,
        checkpoints: CheckpointStore | None = None,
        dead_letters: DeadLetterStore | None = None,
        start: Start = "bootstrap",
        partition: str | None = None,
        ops: str | Iterable[str] | None = None,
        **options: Unpack[OptionFields],
    ) -> None:
        self.options = parse_options(options)
        self.consumer = consumer
        self.schemas = SchemaSet()
        self._relays = _urls("relays", relays)
        self._bootstraps = _urls("bootstraps", bootstraps)
        self._store: CheckpointStore = checkpoints or NoCheckpoints()
        self._warns = checkpoints is None
        self._dead_letters = dead_letters
        if self.options.dispatch == "across_windows" and isinstance(
            checkpoints, ApplicationCheckpoints | AsyncpgCheckpoints | DatabaseCheckpoints
        ):
            raise ConfigError(
                "dispatch='across_windows' delivers events after a checkpoint before the "
                "checkpoint is stored, so the application would commit more than the checkpoint "
                "covers; with checkpoints in its transaction use 'within_window' or 'serial'"
            )
        self._start = start
        first_resume(start, bool(self._bootstraps))
        self._subscription = Subscription(
            database, _globs(sources), _ops(ops), _partition(partition)
        )
        self._pull: Pull | None = None
        self._dispatcher: Dispatcher | None = None
        self._delivery: Delivery | None = None
        self._buffer: ReplayBuffer | None = None
        self._steering = Steering()
        self._serving: asyncio.Task[Any] | None = None
        self._iterators: weakref.WeakSet[Windows | AsyncWindows] = weakref.WeakSet()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the iterators of ``windows`` that are still open."""
        for windows in list(self._iterators):
            if isinstance(windows, Windows):
                windows.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the iterators of ``awindows``, and end ``serve`` in order."""
        for windows in list(self._iterators):
            if isinstance(windows, AsyncWindows):
                await windows.aclose()
        if self._serving is not None and self._serving is not asyncio.current_task():
            self.stop()
            await asyncio.wait({self._serving})

    @property
    def database(self) -> str:
        """The database that the client reads."""
        return self._subscription.database

    @property
    def clock(self) -> str | None:
        """The identity of the stream's clock, once a server has reported it."""
        return self._pull.machine.clock if self._pull else None

    @property
    def status(self) -> Status:
        """The client's present state."""
        pull, dispatcher = self._pull, self._dispatcher
        stats = pull.stats if pull else PullStats()
        delivery, buffer = self._delivery, self._buffer
        position = dispatcher.position if dispatcher else None
        lag_windows, oldest_us = buffer.lag() if buffer else (0, None)
        lag_s = None
        if stats.mode == "relay" and oldest_us is not None:
            lag_s = max(0.0, time.time() - oldest_us / 1e6)
        elif stats.mode == "relay" and position and stats.newest and position >= stats.newest:
            lag_s = 0.0
        return Status(
            mode=stats.mode,
            server=stats.server,
            position=position,
            checkpoint=delivery.checkpoint if delivery else None,
            newest=stats.newest,
            event_count=dispatcher.event_count if dispatcher else 0,
            window_count=dispatcher.window_count if dispatcher else 0,
            rollback_count=delivery.rollback_count if delivery else 0,
            bootstrap_count=pull.machine.bootstrap_count if pull else 0,
            gap_count=pull.machine.gap_count if pull else 0,
            failure_count=stats.failure_count,
            last_error=stats.last_error,
            lag_s=lag_s,
            lag_windows=lag_windows,
            buffered_bytes=buffer.held_bytes if buffer else 0,
            is_flowing=stats.is_flowing,
            is_ahead=stats.is_ahead,
            is_paused=self._steering.is_paused,
        )

    @property
    def origin(self) -> Checkpoint | None:
        """Where the consumption began; None until a server has reported it."""
        return self._pull.origin_checkpoint if self._pull else None

    async def resolved(self) -> tuple[Position, int] | None:
        """A position, and a time in microseconds since 1970 on the relay's clock: everything that
        was committed before the time is at or before the position.

        This asks the relay.  None while nothing is consumed, in a bootstrap, and where the relay
        does not know.

        Raises:
            DatabusError: the relay does not answer.
        """
        return await self._pull.resolved() if self._pull else None

    def run(self) -> None:
        """Serve the consumer until ``stop``, SIGINT or SIGTERM; blocks.

        The first signal ends it in order, with a last checkpoint; a second SIGINT raises
        KeyboardInterrupt.

        Raises:
            DatabusError: the error that ``onError`` received.
        """
        run_until_signal(self.serve, self.stop)

    async def serve(self) -> None:
        """Serve the consumer until ``stop`` or until the task is cancelled.

        Raises:
            DatabusError: the error that ``onError`` received.
        """
        if self.consumer is None:
            raise ConfigError("no consumer was given: DatabusClient(consumer=MyConsumer())")
        async with self._reading() as stream:
            self._serving = asyncio.current_task()
            held = None
            if self._dead_letters is not None:
                held = HeldEvents(self._dead_letters, self.options.max_dead_letters)
            self._delivery = Delivery(
                consumer=self.consumer,
                store=self._store,
                stream=stream,
                options=self.options,
                rng=random.Random(self.options.seed),
                held=held,
            )
            with self._steering.attached(stream.buffer.wake, self._delivery.hurry):
                try:
                    await self._delivery.run()
                finally:
                    self._serving = None

    def stop(self) -> None:
        """End ``run``, ``serve`` or the iteration.

        As ``pause``, ``resume`` and ``seek``: from any thread, task or signal handler, at any time.
        If nothing runs, the next one ends at once.
        """
        self._steering.stop()

    def pause(self) -> None:
        """Call nothing, and return no window, after the present one until ``resume``.

        The client reads ahead ``buffer_bytes`` meanwhile and then waits; no window is lost.
        """
        self._steering.pause()

    def resume(self) -> None:
        """End a pause."""
        self._steering.resume()

    def seek(self, to: SeekTarget) -> None:
        """Continue after an SCN, a position or a checkpoint, or with the first window that was
        committed at a time or later; when the present window has ended.

        Nothing that was fetched before is delivered after it.  The new position is stored, and a
        consumer is called with ``onRollback(checkpoint)``.  If a callback is failing, what follows
        the last checkpoint is given up.

        Raises:
            ConfigError: ``to`` is of another form, or a checkpoint of another database.
        """
        self._steering.seek(seek_target(to, self.database))

    def awindows(self, *, idle_s: float | None = None) -> AsyncWindows:
        """The windows one after another; ``await window.acommit()`` when done with one.

        Ends at ``stop``, or when a relay has sent nothing for ``idle_s``.

        Raises:
            DatabusError: the stream cannot be continued.
        """
        windows = AsyncWindows(self._reader(AsyncPulledWindow), idle_s)
        self._iterators.add(windows)
        return windows

    def windows(self, *, idle_s: float | None = None) -> Windows:
        """As ``awindows``, for code without an event loop: ``window.commit()`` when done.

        Frames are pulled by a thread in the background.
        """
        windows = Windows(self._reader, idle_s)
        self._iterators.add(windows)
        return windows

    async def raw_windows(
        self, start: Start | None = None, *, part_bytes: int = 4 << 20
    ) -> AsyncGenerator[RawWindows, None]:
        """The frames as they are, in whole windows; no checkpoint is read or stored.

        ``start`` overrides the client's own.  The schemas of all returned rows are in
        ``schemas``.  Every frame comes once: after a failure the client resumes at the next one.
        Leave it early only within ``contextlib.aclosing``, which closes its connection.

        Raises:
            ScnTooOld: the relays do not reach back to ``start`` and no bootstrap server is
                configured.
            DatabusError: a failure that a retry does not repair.
        """
        resume = first_resume(self._start if start is None else start, bool(self._bootstraps))
        sink = RawSink(self.options.buffer_bytes, part_bytes)
        async with self._pulling(sink, resume) as pull:
            async for part in read_raw(sink, pull.pulling):
                yield part

    @contextlib.asynccontextmanager
    async def _reader(self, new_window: NewWindow[W]) -> AsyncIterator[WindowReader[W]]:
        async with self._reading() as stream:
            reader = WindowReader(stream=stream, store=self._store, new_window=new_window)
            with self._steering.attached(stream.buffer.wake), contextlib.closing(reader):
                yield reader

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[Stream]:
        """A stream that begins at the stored checkpoint."""
        if self._warns:
            self._warns = False
            log.warning(
                "database %s: nothing stores checkpoints, so every start begins at start=%r; give "
                "checkpoints=FileCheckpoints(path), or NoCheckpoints() if you want that",
                self.database,
                self._start,
            )
        try:
            checkpoint = await self._load()
            buffer = self._buffer = ReplayBuffer(self.options.buffer_bytes)
            resume = checkpoint or first_resume(self._start, bool(self._bootstraps))
            async with self._pulling(buffer, resume) as pull:
                dispatcher = self._dispatcher = Dispatcher(
                    buffer=buffer,
                    decoding=Decoding(
                        self.database,
                        self.schemas,
                        self.options.reader_schemas,
                        objects=self.options.objects,
                    ),
                    options=self.options,
                    clock_of=lambda: pull.machine.clock or "",
                    checkpoint=checkpoint,
                )
                yield Stream(pull, buffer, dispatcher, self._steering)
        finally:
            self._close_stores()

    async def replay_dead_letters(self) -> Replayed:
        """Call the consumer with its dead letters again, in order; those that it takes are removed.

        The client must not be running, in no process: the stores are locked where they can be.

        Raises:
            ConfigError: there is no consumer, or no store of dead letters.
            DatabusError: a store cannot be used.
        """
        if self.consumer is None or self._dead_letters is None:
            raise ConfigError("a replay needs DatabusClient(consumer=..., dead_letters=...)")
        try:
            return await DeadLetterReplay(
                consumer=self.consumer,
                letters=self._dead_letters,
                store=self._store,
                checkpoint=await self._load(),
                options=self.options,
            ).run()
        finally:
            self._close_stores()

    def _close_stores(self) -> None:
        for store in (self._store, self._dead_letters):
            close = getattr(store, "close", None)
            if close is not None:
                close()

    async def _load(self) -> Checkpoint | None:
        loading = self._store.load()
        checkpoint = await loading if inspect.isawaitable(loading) else loading
        if checkpoint is not None and checkpoint.database != self.database:
            raise BadCheckpoint(
                f"the stored checkpoint is of database {checkpoint.database}, this client reads "
                f"{self.database}: use one store for each database"
            )
        return checkpoint

    @contextlib.asynccontextmanager
    async def _pulling(self, sink: FrameSink, resume: Resume) -> AsyncIterator[Pull]:
        options = self.options
        machine = Machine.of_options(options, self.database, self._relays, self._bootstraps, resume)
        async with Pull(self._subscription, machine, sink, self.schemas, options) as pull:
            self._pull = pull
            pull.begin(machine.resume, 0)
            yield pull


def _urls(name: str, urls: Sequence[str]) -> tuple[HiddenUrl, ...]:
    if isinstance(urls, str):
        raise ConfigError(f"{name} is the text {HiddenUrl(urls)!r}; give a list of URLs")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{name}: {HiddenUrl(url)!r} is not an http:// or https:// URL")
    return tuple(map(HiddenUrl, urls))


def _globs(sources: Iterable[str]) -> tuple[str, ...]:
    if isinstance(sources, str):
        return parse_sources(sources)
    return tuple(sources)


def _ops(ops: str | Iterable[str] | None) -> str | None:
    if ops is None:
        return None
    text = ops if isinstance(ops, str) else ",".join(ops)
    parse_ops(text)
    return text


def _partition(partition: str | None) -> str | None:
    if partition is not None:
        parse_partition(partition)
    return partition
