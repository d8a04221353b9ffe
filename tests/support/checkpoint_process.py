"""A consumer as a child of tests/support/warm_process.py, which kills itself.

It appends each event to a table without a key, in the transaction of its checkpoint: an event that
took effect twice is there twice.  ``step`` names how many of its own steps it survives, ``after_s``
when a timer kills it, wherever it is then.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sqlite3
import threading
from typing import Any

import asyncpg

from databus.client import (
    AsyncpgCheckpoints,
    Checkpoint,
    Consumer,
    DatabaseCheckpoints,
    DatabusClient,
    Event,
)
from databus.client.application.frame_blocks import Block
from databus.common.frame.frame_format import Op
from tests.support.database_connection import connect
from tests.support.live_relay import ORDERS, window

INSERT = "INSERT INTO applied (scn, seq) VALUES (%s, %s)"


class Appender(Consumer):
    """Appends events by a DB-API connection."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.url: str = settings["url"]
        self.client: DatabusClient
        self._step_count = 0

    def open(self) -> Any:
        """The store; opens the connection of the rows."""
        self.connection = connect(self.url)
        self.insert = INSERT
        if isinstance(self.connection, sqlite3.Connection):
            self.insert = INSERT.replace("%s", "?")
            self.connection.execute("PRAGMA synchronous = OFF")
        self.store = DatabaseCheckpoints("appender", lambda: connect(self.url))
        return self.store

    def step(self) -> None:
        """A step is about to be made, or was."""
        if self._step_count == 0 and "after_s" in self.settings:
            kill = threading.Timer(self.settings["after_s"], os.kill, (os.getpid(), signal.SIGKILL))
            kill.daemon = True
            kill.start()
        self._step_count += 1
        if self._step_count == self.settings.get("step"):
            os.kill(os.getpid(), signal.SIGKILL)

    def stop_at_the_end(self, checkpoint: Checkpoint) -> None:
        if checkpoint.position.scn >= self.settings["until_scn"]:
            self.client.stop()

    def onDataEvent(self, event: Event) -> Any:
        self.step()
        cursor = self.connection.cursor()
        cursor.execute(self.insert, (event.scn, event.seq))
        cursor.close()

    def onCheckpoint(self, checkpoint: Checkpoint) -> Any:
        self.step()
        self.store.put(self.connection, checkpoint)
        self.step()
        self.connection.commit()
        self.step()
        self.stop_at_the_end(checkpoint)

    def onRollback(self, checkpoint: Checkpoint | None) -> Any:
        self.connection.rollback()


class AsyncAppender(Appender):
    """Appends events by asyncpg."""

    def open(self) -> Any:
        self.transaction: Any = None
        self.async_store = AsyncpgCheckpoints("appender", lambda: asyncpg.connect(self.url))
        return self.async_store

    async def onStartConsumption(self) -> None:
        self.connection = await asyncpg.connect(self.url)

    async def _begin(self) -> None:
        if self.transaction is None:
            self.transaction = self.connection.transaction()
            await self.transaction.start()

    async def onDataEvent(self, event: Event) -> None:
        self.step()
        await self._begin()
        await self.connection.execute(
            "INSERT INTO applied (scn, seq) VALUES ($1, $2)", event.scn, event.seq
        )

    async def onCheckpoint(self, checkpoint: Checkpoint) -> None:
        await self._begin()
        self.step()
        await self.async_store.put(self.connection, checkpoint)
        self.step()
        await self.transaction.commit()
        self.transaction = None
        self.step()
        self.stop_at_the_end(checkpoint)

    async def onRollback(self, checkpoint: Checkpoint | None) -> None:
        if self.transaction is not None:
            await self.transaction.rollback()
            self.transaction = None

    async def onStopConsumption(self) -> None:
        await self.connection.close()


def warm_up() -> None:
    """Load the compiled loops, which every child would load again."""
    assert Block(window(1, [(Op.INSERT, ORDERS, 1)]), bootstrap=False).count == 2


def main(settings: dict[str, Any]) -> None:
    """Consume until killed, or until the last window."""
    faulthandler.dump_traceback_later(60)  # Where it is, should it not come to its end.
    consumer = (AsyncAppender if settings["driver"] == "asyncpg" else Appender)(settings)
    consumer.client = DatabusClient(
        database="shop",
        relays=[settings["relay"]],
        consumer=consumer,
        checkpoints=consumer.open(),
        start="oldest",
        max_retries=0,
        **settings.get("options", {}),
    )
    consumer.client.run()
