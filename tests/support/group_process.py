"""A member of a group as a process of its own: ``python -m ... SETTINGS``.

It appends each event to the table ``delivered``, which keeps the order of the commits.  With
``put`` the events are in the transaction of the checkpoint, so each is there once.  Otherwise the
sink is another store, as it were: a transaction for each event, which is refused if the fence of
the partition is above that of the event.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from typing import Any

from databus.client import (
    Checkpoint,
    Consumer,
    DatabaseLeases,
    Event,
    GroupClient,
    OwnedPartition,
    Result,
)
from tests.support.database_connection import connect

_INSERT = "INSERT INTO delivered (number, fence, scn, seq, id, process) VALUES (?, ?, ?, ?, ?, ?)"
_IN_CALLBACK_S = 0.002


class PartitionAppender(Consumer):
    """Appends the events of one partition."""

    def __init__(self, partition: OwnedPartition, settings: dict[str, Any]) -> None:
        self.partition = partition
        self.settings = settings

    def onStartConsumption(self) -> None:
        self.connection = connect(self.settings["url"])

    def execute(self, sql: str, values: tuple[Any, ...]) -> int:
        mark = "?" if self.settings["driver"] == "sqlite" else "%s"
        cursor = self.connection.cursor()
        cursor.execute(sql.replace("?", mark), values)
        count: int = cursor.rowcount
        cursor.close()
        return count

    def onDataEvent(self, event: Event) -> Result | None:
        owned = self.partition
        assert owned.covers(event.key_hash), "an event of another partition"
        assert event.value is not None
        if not self.settings["puts"]:
            time.sleep(_IN_CALLBACK_S)  # Where a pause is to come, before the write.
            if not self.execute(
                "UPDATE fences SET fence = ?, writes = writes + 1 WHERE number = ? AND fence <= ?",
                (owned.fence, owned.number, owned.fence),
            ):
                self.connection.rollback()
                return Result.ERROR_FATAL
        values = (owned.number, owned.fence, event.scn, event.seq, event.value["id"])
        self.execute(_INSERT, (*values, self.settings["process"]))
        if not self.settings["puts"]:
            self.connection.commit()
        return None

    def onCheckpoint(self, checkpoint: Checkpoint) -> None:
        if self.settings["puts"]:
            self.partition.put(self.connection, checkpoint)
            self.connection.commit()

    def onRollback(self, checkpoint: Checkpoint | None) -> None:
        self.connection.rollback()

    def onStopConsumption(self) -> None:
        self.connection.close()


def main(settings: dict[str, Any]) -> None:
    """Be a member until SIGTERM, or until killed."""
    GroupClient(
        group="storm",
        partitions=settings["partitions"],
        leases=DatabaseLeases(lambda: connect(settings["url"])),
        consumer=lambda partition: PartitionAppender(partition, settings),
        database="shop",
        relays=[settings["relay"]],
        start="oldest",
        lease_s=settings["lease_s"],
        idle_checkpoint_s=0.2,
        max_retries=0,
    ).run()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(120)  # Where it is, should it not come to its end.
    main(json.loads(sys.argv[1]))
