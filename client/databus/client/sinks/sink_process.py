"""One configured sink from start to stop: the client, the checkpoint, the pauses after failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from typing import Any

from databus.client.application.signal_stops import run_until_signal
from databus.client.checkpoints.checkpoint_stores import FileCheckpoints
from databus.client.client import DatabusClient
from databus.client.deadletters.dead_letter import DeadLetter
from databus.client.deadletters.dead_letter_stores import FileDeadLetters
from databus.client.delivery.callback_results import BoundedCalls
from databus.client.delivery.dead_letter_replay import DeadLetterReplay, Replayed
from databus.client.pulling.pull_machine import Backoff
from databus.client.sinks.refused_rows import RefusedRows
from databus.client.sinks.sink import Sink, SinkContext
from databus.client.sinks.sink_consumer import SinkConsumer
from databus.client.sinks.sink_metrics import SinkCollector, SinkFacts, served_metrics
from databus.client.sinks.sink_routes import SinkRoutes, load_transform
from databus.common.checkpoint import Checkpoint
from databus.common.errors import ConfigError, ConsumerFailed, SinkUnavailable
from databus.common.sink_config import SinkConfig

log = logging.getLogger("databus.sink")
_WITHOUT_LIMIT = 2**31


class SinkCheckpoints:
    """The checkpoint of a sink: the one that it stores with its rows, or one in a file.

    Owner: one client.
    Durability: the sink's, or that of ``FileCheckpoints``.
    """

    def __init__(self, consumer: SinkConsumer, file: FileCheckpoints | None) -> None:
        self._consumer = consumer
        self._file = file

    async def load(self) -> Checkpoint | None:
        """Open the sink, and read the checkpoint."""
        stored = await self._consumer.open()
        return stored if self._file is None else self._file.load()

    def save(self, checkpoint: Checkpoint) -> None:
        """Store the checkpoint, unless the sink has."""
        if self._file is not None:
            self._file.save(checkpoint)

    def close(self) -> None:
        """Unlock the file."""
        if self._file is not None:
            self._file.close()


class SinkReplay(DeadLetterReplay):
    """Writes the rows that were set aside with the sink itself."""

    async def deliver(self, calls: BoundedCalls, letter: DeadLetter) -> None:
        """Write one row, and commit it."""
        assert isinstance(self.consumer, SinkConsumer) and self.checkpoint is not None
        await self.consumer.take_letter(letter, self.checkpoint)


class SinkProcess:
    """Runs one sink until ``stop``.

    A failure of the target is retried with a pause that doubles each time.  Back-pressure: while
    the sink writes, at most ``buffer_bytes`` of frames are read ahead.

    Owner: one event loop, or one thread that calls ``run``; ``stop`` may be called from anywhere.
    Raises: from ``serve`` and ``run``: the error that stopped the sink.
    """

    def __init__(self, config: SinkConfig, sink: Sink, **options: Any) -> None:
        routes = SinkRoutes(
            config.database,
            config.route,
            default_target=sink.default_target,
            transform=load_transform(config.transform) if config.transform else None,
        )
        context = SinkContext(
            name=config.name,
            database=config.database,
            routes=routes,
            clock=lambda: self.client.clock or "",
        )
        self._config = config
        self.dead_letters = FileDeadLetters(config.data_dir / f"{config.name}.deadletters")
        refused = None
        if config.refused == "set-aside":
            refused = RefusedRows(self.dead_letters, config.max_dead_letters)
        self.consumer = SinkConsumer(sink, context, batch_rows=config.batch_rows, refused=refused)
        file = None
        if not sink.stores_checkpoint:
            file = FileCheckpoints(config.data_dir / f"{config.name}.checkpoint")
        self._store = SinkCheckpoints(self.consumer, file)
        settings: dict[str, Any] = {
            "objects": False,
            "client_name": config.name,
            "batch_rows": config.batch_rows,
            "checkpoint_every_s": config.commit_every,
            "retry_s": config.retry,
            "retry_most_s": config.retry_most,
            "max_retries": config.max_retries or _WITHOUT_LIMIT,
            "callback_budget_s": None,
        }
        self.client = DatabusClient(
            database=config.database,
            relays=[url.reveal for url in config.relays],
            bootstraps=[url.reveal for url in config.bootstraps],
            sources=config.sources,
            consumer=self.consumer,
            checkpoints=self._store,
            start=config.start,
            partition=config.partition,
            **settings | options,
        )
        self._is_stopped = threading.Event()
        self.metrics_url = ""

    def run(self) -> None:
        """Run until ``stop``, SIGINT or SIGTERM; blocks.  The last rows are committed."""
        run_until_signal(self.serve, self.stop)

    async def serve(self) -> None:
        """Run until ``stop``."""
        async with contextlib.AsyncExitStack() as stack:
            if self._config.listen:
                collector = SinkCollector(self._config.name, self._facts)
                server = served_metrics(self._config.listen, collector)
                self.metrics_url = await stack.enter_async_context(server)
            await self._serve()

    def _facts(self) -> SinkFacts:
        return SinkFacts(self.consumer.counts, self.client.status)

    async def _serve(self) -> None:
        backoff = Backoff(self._config.retry, self._config.retry_most)
        attempt = 0
        try:
            while not self._is_stopped.is_set():
                try:
                    await self.client.serve()
                    return
                except SinkUnavailable as error:
                    # The sink could not be opened.
                    attempt += 1
                    if self._config.max_retries and attempt > self._config.max_retries:
                        raise
                    log.warning("the sink %s cannot be opened: %s", self._config.name, error)
                    pause_s = backoff.delay_s(attempt, random.Random())
                    await asyncio.to_thread(self._is_stopped.wait, pause_s)
                except ConsumerFailed as error:
                    raise self.consumer.fatal or error from error
        finally:
            await self.consumer.close()

    async def replay(self) -> Replayed:
        """Write the rows that were set aside again, in order; those that are taken are removed.

        The sink must not be running.

        Raises:
            ConfigError: the sink has not committed yet.
            DatabusError: the sink cannot be opened, or the letters cannot be read.
        """
        try:
            checkpoint = await self._store.load()
            if checkpoint is None:
                raise ConfigError(f"the sink {self._config.name} has no checkpoint; start it first")
            return await SinkReplay(
                consumer=self.consumer,
                letters=self.dead_letters,
                store=self._store,
                checkpoint=checkpoint,
                options=self.client.options,
            ).run()
        finally:
            await self.consumer.close()
            self._store.close()
            self.dead_letters.close()

    def stop(self) -> None:
        """End ``serve`` after the call that runs; from any thread."""
        self._is_stopped.set()
        self.client.stop()
