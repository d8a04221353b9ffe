"""The schemas that the log writer stores, while its client learns others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.processes import log_writer
from databus.bootstrap.processes.log_writer import LogWriter
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.common.config import BootstrapConfig
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from tests.bootstrap.model import CLOCK, START

OLD = SourceSchema("shop.t", (Column("id", Kind.INT, nullable=False),), ("id",))
NEW = SourceSchema("shop.t", (*OLD.columns, Column("v", Kind.INT)), ("id",))


async def test_the_current_schema_is_that_of_the_client_whatever_it_learns_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt = SchemaSet((OLD, NEW))

    class Client:
        schemas = learnt

        def __init__(self, **_: Any) -> None:
            pass

        async def raw_windows(self, _: object) -> AsyncIterator[Any]:
            yield SimpleNamespace(data=b"", position=START)
            yield SimpleNamespace(data=b"", position=START)

    store = HotLog.add_schemas

    def while_it_registers(log: HotLog, schemas: Iterable[SourceSchema]) -> None:
        learnt.announce(OLD)  # The first of those that a relay lists, in their order.
        store(log, schemas)
        learnt.announce(NEW)

    monkeypatch.setattr(log_writer, "DatabusClient", Client)
    monkeypatch.setattr(HotLog, "add_schemas", while_it_registers)
    logs = OpenLogs(writes=True)
    writer = LogWriter(BootstrapConfig(data_dir=tmp_path, relays=("http://none",)), "shop", logs)
    writer.log.bind("shop", CLOCK, START)
    await writer._read()
    assert SchemaSet(writer.log.schemas()).latest("shop.t") == NEW
    logs.close()
