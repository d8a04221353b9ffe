"""The connection of a fetcher to its source, and how far it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig
from databus.common.errors import DatabusError, ServerUnavailable
from databus.common.processes.completion import completed
from databus.relay.columns.ruled_source import within_limits
from databus.relay.sources import contract
from databus.relay.sources.suspended_tables import TableSuspension

_log = logging.getLogger(__name__)


class SourceLink:
    """The connection of one database.

    Invariants:
        I1. ``source`` is one that was opened and is not closed, or None.
        I2. ``streaming`` is set only while a source streams.

    ``is_relaying``: the last source is another relay.
    ``attempt`` counts the attempts that did not start to stream.

    Owner: the fetcher's event loop.
    """

    def __init__(
        self, config: DatabaseConfig, make_source: Callable[[DatabaseConfig], contract.Source]
    ) -> None:
        self.source: contract.Source | None = None
        self.is_relaying = False
        self.streaming = asyncio.Event()
        self.attempt = 0
        self._config = config
        self._make_source = make_source
        self._acked_scn = -1

    def make(self) -> contract.Source:
        """A new source, not opened yet."""
        source = within_limits(self._make_source(self._config), self._config)
        self.is_relaying = isinstance(source, contract.RelayingSource)
        return source

    def connected(self, source: contract.Source) -> None:
        """``source`` is open, and is about to stream."""
        self.source, self._acked_scn = source, -1

    def has_begun(self) -> bool:
        """Something came from the source; returns whether that is the first time."""
        if self.streaming.is_set():
            return False
        self.streaming.set()
        self.attempt = 0
        return True

    async def close(self, source: contract.Source) -> None:
        """Close a source of ``make``, in any state; a cancelled caller waits until it is closed."""
        self.streaming.clear()
        self.source = None
        with contextlib.suppress(Exception):
            await completed(source.close())

    async def acknowledge(self, scn: int, durable: Position | None) -> None:
        """Everything up to ``scn`` is on disk, in the ring up to ``durable``; a refusal is logged,
        and the next call retries."""
        source, name = self.source, self._config.name
        parent: object = source
        if durable is not None and isinstance(parent, contract.RelayingSource):
            try:
                await parent.release(durable)
            except (DatabusError, OSError) as error:
                _log.info("%s: not released: %s", name, error)
        if source is not None and scn > self._acked_scn:
            try:
                await source.ack(scn)
                self._acked_scn = scn
            except (DatabusError, OSError) as error:
                _log.info("%s: not acknowledged: %s", name, error)

    def suspended(self) -> Mapping[str, TableSuspension] | None:
        """The tables that the source suspends now; None while it is not connected."""
        source = self.source
        if source is None:
            return None
        return source.suspended() if isinstance(source, contract.SuspendingSource) else {}

    def origin(self) -> contract.RelayingSource | None:
        """The relay that runs this database's dumps instead of us; None if they run here."""
        if not self.is_relaying:
            return None
        source = self.source
        if source is not None and isinstance(source, contract.RelayingSource):
            return source
        raise ServerUnavailable(
            f"{self._config.name} is read from {self._config.url}, which runs its dumps and does "
            f"not answer now"
        )
