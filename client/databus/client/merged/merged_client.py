"""``MergedClient``: several databases, or partitions of one, as one stream in commit time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypedDict, Unpack

from databus.client.application.consumer import Consumer
from databus.client.application.options import OptionFields, parse_options
from databus.client.application.signal_stops import run_until_signal
from databus.client.checkpoints.checkpoint_stores import CheckpointStore, NoCheckpoints
from databus.client.client import DatabusClient, Start, Status
from databus.client.merged.merged_delivery import MergedDelivery
from databus.client.merged.merged_stream import MergedStream, StreamCheckpoints
from databus.client.merged.merged_windows import AsyncMergedWindows, MergedWindows
from databus.client.merged.stream_merger import OnStall, StreamMerger
from databus.common.checkpoint import MergedCheckpoint
from databus.common.errors import ConfigError

log = logging.getLogger("databus.client")


class MergeStream(TypedDict, total=False):
    """One stream of a merge: arguments of ``DatabusClient``, and a name.

    ``database`` and ``relays`` are needed.  ``name`` is that of the stream in checkpoints, in the
    status and in metrics: by default the database, with the partition if there is one.
    """

    name: str
    database: str
    relays: Sequence[str]
    sources: Iterable[str]
    bootstraps: Sequence[str]
    partition: str | None
    ops: str | Iterable[str] | None
    start: Start


@dataclass(frozen=True, slots=True)
class MergedStatus:
    """The state of a merge."""

    resolved_us: int
    """Every window with an earlier merged time has been given, in microseconds since 1970; 0 before
    all streams have begun."""
    stalled: tuple[str, ...]
    """Streams that have held back the others for ``stall_s``, or are left behind."""
    held_by: tuple[str, ...]
    """Streams that must bring more before the next window comes."""
    window_count: int
    """Windows that were given since the last start or rollback."""
    checkpoint: MergedCheckpoint | None
    """The last stored checkpoint."""
    streams: dict[str, Status]
    """The state of the client of each stream."""


class MergedClient:
    """Gives the windows of several streams in one order, that of commit time.

    Order:
        M1. A window's merged time is its commit time, or the merged time that its stream has
            reached already if that is later: it never falls within a stream.  Windows come in the
            order of (merged time, database, scn, name of the stream).
        M2. A window comes when every stream has brought a later one, or its relay has reported
            that everything that was committed before is delivered.  A database in which nothing is
            written does not hold back the others for long: its relay asks it every second.
        M3. While a stream reads a bootstrap, its windows have the merged time at which it began
            (0 at the start), so they come first.
        M4. After the windows up to a merged time, the tables of all streams are as their
            databases had them together at that commit time, as far as their clocks agree.

    The clocks of the database servers decide about the order between databases, and it is as exact
    as they are.  ``skew_s`` is how far the clocks of relays and servers may differ: a report
    that a database is resolved counts for so much less.  A window that is committed with an
    earlier time all the same gets the merged time that its stream has reached (M1).

    Stalls: a stream that has held back the others for ``stall_s`` is named, in the log, in
    ``status.stalled`` and in the metrics.  With ``on_stall="wait"`` the others wait.  With
    ``"leave"`` they go on; when the stream comes back, its windows come at once, each marked
    ``is_late``, until it has caught up.

    Memory: each stream is read ahead as far as its client's ``buffer_bytes``, and no further.

    Checkpoints: one for all streams (``MergedCheckpoint``), in any store.  After a crash every
    window behind it comes again, each stream in its own order.  The order between streams is the
    same if no stream was left behind and no report was wrong.

    ``options`` are those of ``DatabusClient``, for all streams; ``dispatch`` is serial.

    Owner: one event loop, or one thread that calls ``run`` or ``windows``; ``stop``, ``pause``,
    ``resume`` and ``status`` may be called from anywhere.
    Raises: ConfigError for an argument that is not of its form.
    """

    def __init__(
        self,
        *,
        streams: Sequence[MergeStream],
        consumer: Consumer | None = None,
        checkpoints: CheckpointStore | None = None,
        start: Start = "bootstrap",
        stall_s: float = 10.0,
        on_stall: OnStall = "wait",
        skew_s: float = 1.0,
        **options: Unpack[OptionFields],
    ) -> None:
        self.options = parse_options(options)
        if self.options.dispatch != "serial":
            raise ConfigError("a merge has one order: dispatch must be 'serial'")
        if on_stall not in ("wait", "leave"):
            raise ConfigError(f"on_stall is {on_stall!r}, not wait or leave")
        if stall_s <= 0 or skew_s < 0:
            raise ConfigError(f"stall_s is {stall_s} and skew_s {skew_s}: give positive times")
        self.consumer = consumer
        self._store: CheckpointStore = checkpoints or NoCheckpoints()
        self._warns = checkpoints is None
        self._stall_s, self._on_stall, self._skew_s = stall_s, on_stall, skew_s
        self._settings: dict[str, dict[str, Any]] = {}
        for one in streams:
            settings: dict[str, Any] = {"start": start, **one, **options}
            name = settings.pop("name", "") or _name_of(settings)
            if name in self._settings:
                raise ConfigError(f"two streams have the name {name!r}: give each a name")
            DatabusClient(**settings)  # raises what is wrong with them now
            self._settings[name] = settings
        if not self._settings:
            raise ConfigError("a merge needs streams: streams=[{'database': ..., 'relays': [...]}]")
        self._merger: StreamMerger | None = None
        self._clients: dict[str, DatabusClient] = {}
        self._iterators: list[MergedWindows | AsyncMergedWindows] = []
        self._is_stopping = threading.Event()
        self._is_paused = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the iterators of ``windows`` that are still open."""
        for windows in self._iterators:
            if isinstance(windows, MergedWindows):
                windows.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the iterators of ``awindows`` that are still open."""
        for windows in self._iterators:
            if isinstance(windows, AsyncMergedWindows):
                await windows.aclose()

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of the streams."""
        return tuple(self._settings)

    @property
    def status(self) -> MergedStatus:
        """The present state."""
        merger = self._merger
        return MergedStatus(
            resolved_us=merger.order.resolved_us if merger else 0,
            stalled=tuple(merger.stalled) if merger else (),
            held_by=tuple(sorted(merger.order.held_by())) if merger else (),
            window_count=merger.window_count if merger else 0,
            checkpoint=merger.stored if merger else None,
            streams={name: client.status for name, client in self._clients.copy().items()},
        )

    def windows(self, *, idle_s: float | None = None) -> MergedWindows:
        """The windows in order; ``window.commit()`` when done.

        Ends at ``stop``, or when no window has come for ``idle_s``.
        """
        windows = MergedWindows(self._iterating, idle_s)
        self._iterators.append(windows)
        return windows

    def awindows(self, *, idle_s: float | None = None) -> AsyncMergedWindows:
        """As ``windows``, in an event loop; ``await window.acommit()`` when done."""
        windows = AsyncMergedWindows(self._iterating, idle_s)
        self._iterators.append(windows)
        return windows

    def run(self) -> None:
        """Serve the consumer until ``stop``, SIGINT or SIGTERM; blocks."""
        run_until_signal(self.serve, self.stop)

    async def serve(self) -> None:
        """Serve the consumer until ``stop``.

        The callbacks are those of ``Consumer``, but for ``onDataBatch``; ``onCheckpoint`` and
        ``onRollback`` get the checkpoint of all streams.  ``event.database`` tells the streams of
        different databases apart.

        Raises:
            DatabusError: the error that ``onError`` received.
        """
        if self.consumer is None:
            raise ConfigError("no consumer was given: MergedClient(consumer=MyConsumer())")
        delivery = MergedDelivery(
            self.consumer, self._merging, self.options, self._is_stopping.is_set
        )
        try:
            await delivery.run()
        finally:
            self._is_stopping.clear()

    def stop(self) -> None:
        """End ``run``, ``serve`` or the iteration; from any thread or signal handler."""
        self._is_stopping.set()
        if self._merger is not None:
            self._merger.is_stopping = True
        for client in self._clients.copy().values():
            client.stop()

    def pause(self) -> None:
        """Give no window after the present one until ``resume``."""
        self._is_paused = True
        if self._merger is not None:
            self._merger.is_paused = True

    def resume(self) -> None:
        """End a pause."""
        self._is_paused = False
        if self._merger is not None:
            self._merger.is_paused = False

    @contextlib.asynccontextmanager
    async def _iterating(self) -> AsyncIterator[StreamMerger]:
        """A merge that ``stop`` ends."""
        try:
            async with self._merging() as merger:
                yield merger
        finally:
            self._is_stopping.clear()

    @contextlib.asynccontextmanager
    async def _merging(self, resume: MergedCheckpoint | None = None) -> AsyncIterator[StreamMerger]:
        if self._warns:
            self._warns = False
            log.warning(
                "merge of %s: nothing stores checkpoints; give checkpoints=FileCheckpoints(path)",
                ", ".join(self._settings),
            )
        streams = []
        for name, settings in self._settings.items():
            store = StreamCheckpoints()
            client = DatabusClient(checkpoints=store, **settings)
            self._clients[name] = client
            streams.append(MergedStream(name, client, store, int(self._skew_s * 1e6)))
        merger = self._merger = StreamMerger(
            streams,
            self._store,
            stall_s=self._stall_s,
            on_stall=self._on_stall,
            idle_checkpoint_s=self.options.idle_checkpoint_s,
        )
        merger.is_paused = self._is_paused
        merger.is_stopping = self._is_stopping.is_set()
        try:
            await merger.begin(resume)
            yield merger
        finally:
            await merger.end()
            close = getattr(self._store, "close", None)
            if close is not None:
                close()


def _name_of(settings: dict[str, Any]) -> str:
    partition = settings.get("partition")
    name = str(settings.get("database", ""))
    return f"{name}/{partition}" if partition else name
