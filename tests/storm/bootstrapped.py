"""A bootstrap server beside a relay, and what a consumer holds that begins with a bootstrap.

The relay's windows come through the client library into the log writer, its log and segments.
``Copy`` reads them back as the server does.  Spark merges the segments where there is a session.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from databus.bootstrap.log import seeding
from databus.bootstrap.log.seeding import SEEDED
from databus.bootstrap.processes import log_writer as pauses
from databus.bootstrap.processes.log_writer import LogWriter
from databus.bootstrap.reading.bootstrap_stream import BootstrapStream
from databus.bootstrap.reading.stored_database import OpenLogs, StoredDatabase
from databus.common.checkpoint import ORIGIN, Position
from databus.common.config import BootstrapConfig
from databus.common.errors import DatabusError
from databus.common.filters.stream_filter import StreamFilter
from tests.storm.live import LiveFetcher, Loop, Patience, Stalled
from tests.storm.replica import Replica

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEGMENT_EVERY_S = 0.5
pauses.SEED_POLL_S = pauses.DUMP_POLL_S = pauses.RETRY_S = 0.05
pauses.SEEDED_POLL_S = 0.2
seeding.AGAIN_S = 0.1


class Bootstrapped:
    """The bootstrap server of one relay.

    Owner: the driver's thread; the log writer belongs to ``loop``.
    """

    def __init__(self, loop: Loop, relay: LiveFetcher, folder: Path) -> None:
        self.relay = relay
        self._loop = loop
        self._config = BootstrapConfig(
            data_dir=folder,
            relays=(relay.url,),
            databases=(relay.database,),
            segment_every=SEGMENT_EVERY_S,
            run_grace=0.0,
        )
        self.start()

    def start(self) -> None:
        """Begin, or resume where the log ends."""
        self._loop.run(self._start())

    async def _start(self) -> None:
        self._logs = OpenLogs(writes=True)
        self._writer = LogWriter(self._config, self.relay.database, self._logs)
        self._task = asyncio.create_task(self._writer.run(patient=True))

    def stop(self) -> None:
        """End the log writer; the log stays."""
        self._loop.run(self._stop())

    async def _stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._logs.close()

    def restart(self) -> None:
        """Another log writer on the same folder."""
        self.stop()
        self.start()

    def served(self) -> StoredDatabase:
        """The database as the server has it."""
        return StoredDatabase(
            self.relay.database, self._writer.folder, self._logs, self._writer.store
        )

    def wait(self, position: Position) -> None:
        """Return when the log has everything up to a position of the relay's ring.

        Raises:
            Stalled: it does not come; the message has the log writer's error.
        """
        patience = Patience(self._loop)
        while self._end() < position:
            if patience.is_over or self._task.done():
                word, waited_s = self.served().writer_document(), patience.waited_s
                raise Stalled(
                    str(word.get("state", "")),
                    f"the log is at {self._end()} after {waited_s:.1f} s, not at {position}; "
                    f"its writer reports: {word}",
                    is_slow=patience.is_slow and "error" not in word and not self._task.done(),
                )
            time.sleep(0.002)

    def _end(self) -> Position:
        with contextlib.suppress(DatabusError):
            served = self.served()
            if served.is_ready:
                return served.target_position()
        return ORIGIN

    def unseeded(self, source: str) -> str:
        """Why the server refuses a bootstrap of a table that begins with nothing; "": it does not.

        The server has GONE for a table that the relay cannot read, and names it so.
        """
        one = self.served().seeding().get(source, {})
        state = one.get("state", "unknown")
        return "" if state == SEEDED else f"{state}: {one.get('error', '')}"

    def is_named(self, source: str) -> bool:
        """Whether a table is not served, or relay or log say that it is not followed."""
        return bool(self.unseeded(source)) or self.relay.is_named(source)

    def read(self) -> Replica:
        """What a consumer holds after a bootstrap of all tables."""
        served = self.served()
        everything = StreamFilter()
        stream = BootstrapStream(
            store=served.store,
            log=served.log,
            since=ORIGIN,
            target=served.target_position(),
            stream_filter=everything,
            source_ids=served.source_ids(everything),
        )
        replica = Replica(served.schema_of)
        for piece in stream.pieces():
            replica.apply(bytes(piece.frames))
        schemas = served.schemas()
        for source in replica.tables:
            if (schema := schemas.latest(source)) is not None:
                replica.adopt(schema)
        return replica

    def merge(self, spark: SparkSession, *, full: bool) -> int:
        """Have Spark merge the segments that there are; how many merges that took."""
        from databus.bootstrap.merging.applier import Applier
        from databus.bootstrap.merging.spark_merges import SparkMerges

        return len(Applier(self._writer.store, SparkMerges(spark), grace_us=0).apply(full=full))
