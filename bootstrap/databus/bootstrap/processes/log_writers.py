"""The log writers of one process: one for each database.

What a writer does is in ``log_writer``; ``shared_log`` is one of several over one store.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from dataclasses import dataclass, field
from typing import BinaryIO

from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.log.relay_api import RelayApi, credentials_of
from databus.bootstrap.processes.log_writer import RETRY_S, SEEDED_POLL_S, LogWriter
from databus.bootstrap.processes.shared_log import SharedLog
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.common.config import BootstrapConfig
from databus.common.errors import DatabusError

_LOG = logging.getLogger("databus.bootstrap.processes.log_writers")


@dataclass(slots=True, eq=False)
class WriterGroup:
    """The databases of one of several log writers; its parent adds some at any time."""

    number: int
    databases: list[str] = field(default_factory=list)

    def follow(self, lines: BinaryIO) -> None:
        """Take the names that the parent sends; end the process when there is no parent."""
        for line in lines:
            self.databases += json.loads(line)
        os._exit(0)


async def write_logs(
    config: BootstrapConfig,
    logs: OpenLogs,
    stop: asyncio.Event,
    group: WriterGroup | None = None,
    *,
    leads: bool = True,
) -> None:
    """Write the logs of all configured databases; of all databases of the relays if none is named.

    With ``group``, its databases alone are written.  Databases that are added later are included.
    In a cluster, a log is written while this process has its lease; without ``leads``, it is only
    copied.
    If a store cannot be opened, it is retried: the other databases are written meanwhile.

    Raises:
        StoreError: a store cannot be opened at the start, without ``group``.
        StoreBusy: another process writes one of the logs, likewise.
    """
    writers: dict[str, asyncio.Task[None]] = {}
    stores = Stores(config)
    stopping = asyncio.create_task(stop.wait())
    number = 1 if group is None else group.number
    try:
        async with RelayApi(config.relays, credentials_of(config)) as relay:
            while not stop.is_set():
                patient = bool(writers) or group is not None
                names = await listed_databases(config, relay) if group is None else group.databases
                for name in [name for name in names if name not in writers]:
                    writer = LogWriter(config, name, logs, stores.store(name), number=number)
                    running = (
                        SharedLog(writer).run(leads=leads)
                        if config.cluster
                        else writer.run(patient=patient)
                    )
                    writers[name] = asyncio.create_task(running)
                done, _ = await asyncio.wait(
                    {stopping, *writers.values()},
                    timeout=SEEDED_POLL_S if writers and group is None else RETRY_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done - {stopping}:
                    task.result()
    finally:
        for task in (stopping, *writers.values()):
            task.cancel()
        await asyncio.gather(stopping, *writers.values(), return_exceptions=True)


async def listed_databases(config: BootstrapConfig, relay: RelayApi) -> tuple[str, ...]:
    """The databases of the configuration, or else of the relays; none while no relay answers."""
    if config.databases:
        return config.databases
    try:
        return tuple(await relay.databases())
    except DatabusError as error:
        _LOG.warning("waiting for a relay: %s", error.message)
    except Exception:
        _LOG.exception("listing the databases of a relay")
    return ()
