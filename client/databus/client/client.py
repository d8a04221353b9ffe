"""The client: one subscription to one database, wherever its events are to be read."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from databus.client.machine import Backoff, Machine, Resume, first_resume
from databus.client.options import parse_options
from databus.client.puller import Puller, PullStats, Sink, Subscription
from databus.client.raw import RawSink, RawWindows, read_raw
from databus.client.transport import Transport
from databus.common.checkpoint import Checkpoint, Position
from databus.common.errors import ConfigError
from databus.common.filters import parse_ops, parse_partition, parse_sources
from databus.common.schema import SchemaSet

Start = str | int | Position | Checkpoint


class DatabusClient:
    """Reads the committed changes of ``sources`` of ``database``, in commit order.

    ``relays`` and ``bootstraps`` are base URLs.  ``sources`` are globs over source names.
    ``start`` says where a client without a stored checkpoint begins: ``"bootstrap"`` (the
    whole tables first; ``"oldest"`` where no bootstrap server is given), ``"oldest"``,
    ``"latest"``, an SCN (the first event after it), or a checkpoint.  ``partition`` and
    ``ops`` are filters that the servers apply.  All else is in ``Options``.

    Owner: one event loop, or one thread that calls ``run`` or ``windows``; ``stop`` may be
    called from anywhere.
    Raises: ConfigError for an argument that is not of its form.
    """

    def __init__(
        self,
        *,
        database: str,
        relays: Sequence[str],
        sources: Iterable[str] = (),
        bootstraps: Sequence[str] = (),
        start: Start = "bootstrap",
        partition: str | None = None,
        ops: str | Iterable[str] | None = None,
        **options: Any,
    ) -> None:
        self.options = parse_options(options)
        self._relays = _urls("relays", relays)
        self._bootstraps = _urls("bootstraps", bootstraps)
        self._start = start
        self._subscription = Subscription(
            database, _globs(sources), _ops(ops), _partition(partition)
        )
        self.schemas = SchemaSet()
        self._machine: Machine | None = None
        self._puller: Puller | None = None

    @property
    def database(self) -> str:
        """The database that is read."""
        return self._subscription.database

    @property
    def pull_stats(self) -> PullStats:
        """What the puller has done so far."""
        return self._puller.stats if self._puller else PullStats()

    @property
    def clock(self) -> str | None:
        """The identity of the stream's clock, once a server has named it."""
        return self._machine.clock if self._machine else None

    async def raw_windows(
        self, start: Start | None = None, *, part_bytes: int = 4 << 20
    ) -> AsyncIterator[RawWindows]:
        """The frames as they are, in whole windows; no checkpoint is read or stored.

        ``start`` overrides the client's own.  The schemas of all rows handed out are in
        ``schemas``.  Every frame comes once: after a failure it goes on where it was.

        Raises:
            ScnTooOld: the relays do not reach back to ``start`` and no bootstrap server is
                configured.
            DatabusError: a failure that repeating does not mend.
        """
        resume = first_resume(self._start if start is None else start, bool(self._bootstraps))
        sink = RawSink(self.options.buffer_bytes, part_bytes)
        async with self._pulling(sink, resume) as pulling:
            async for part in read_raw(sink, pulling):
                yield part

    @contextlib.asynccontextmanager
    async def _pulling(self, sink: Sink, resume: Resume) -> AsyncIterator[asyncio.Task[None]]:
        """A puller at work as a task, ended and its connections closed on the way out."""
        options = self.options
        self._machine = Machine(
            database=self.database,
            relays=self._relays,
            bootstraps=self._bootstraps,
            resume=resume,
            on_gap=options.on_gap,
            backoff=Backoff(options.reconnect_s, options.reconnect_most_s),
            max_failures=options.max_pull_failures,
            rng=random.Random(options.seed),
        )
        transport = Transport(
            connect_timeout_s=options.connect_timeout_s,
            answer_timeout_s=options.answer_timeout_s,
            silence_timeout_s=options.silence_timeout_s,
        )
        async with transport:
            self._puller = Puller(
                subscription=self._subscription,
                machine=self._machine,
                transport=transport,
                sink=sink,
                schemas=self.schemas,
                options=options,
            )
            pulling: asyncio.Task[None] = asyncio.create_task(self._puller.run())
            try:
                yield pulling
            finally:
                pulling.cancel()
                await asyncio.wait({pulling})


def _urls(name: str, urls: Sequence[str]) -> tuple[str, ...]:
    if isinstance(urls, str):
        raise ConfigError(f"{name} is the text {urls!r}; give a list of URLs")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{name}: {url!r} is not an http:// or https:// URL")
    return tuple(urls)


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
