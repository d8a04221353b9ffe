"""What tests of open tables and of Spark share: a system, and its tables by its own reader."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

from databus.cli.shop import TABLES, Rows, Shop
from databus.client.arrow import RowDecoder
from databus.client.tables import Range, TableAddress, TableReader
from databus.common.checkpoint import Position
from databus.common.errors import LogTooYoung, NotSeeded, UnknownSource
from tests.support.processes import Processes
from tests.support.system import System, wait_for


def started(folder: Path, processes: Processes, shop: Shop, url: str, **options: Any) -> System:
    """Relay and bootstrap (without applier) over a shop."""
    system = System(folder, shop, url, processes, **options)
    system.start_relay()
    system.start_bootstrap("--no-apply").wait_ready(f"{system.bootstrap_url}/readyz", 90)
    return system


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def name_of(system: System, table: str) -> str:
    return f"{system.shop.dialect.namespace}.{table}"


def write(system: System, steps: int) -> Position:
    """Some transactions; returns where they end, once the bootstrap has them."""
    with system.shop.session() as step:
        for _ in range(steps):
            step()
    return settled(system)


def settled(system: System) -> Position:
    """The stream's end, once the bootstrap's state is that of the source."""

    def is_equal() -> bool:
        try:
            return all(
                keyed(state_of(system, table), key) == source_rows(system, table)
                for table, key in TABLES.items()
            )
        except (LogTooYoung, NotSeeded, UnknownSource):
            return False

    wait_for(is_equal, "the bootstrap has what the source has", 90)
    return TableReader(address(system, "orders")).target()


def address(system: System, table: str) -> TableAddress:
    return TableAddress("shop", name_of(system, table), (), (system.bootstrap_url,))


def state_of(system: System, table: str) -> list[dict[str, Any]]:
    reader = TableReader(address(system, table))
    schema = reader.schema()
    asked = Range("state", None, reader.target(), reader.clock)
    decoder = RowDecoder(schema, reader.schema_of)
    return [row for batch in reader.batches(asked, decoder) for row in batch.to_pylist()]


def source_rows(system: System, table: str) -> Rows:
    return system.shop.rows()[name_of(system, table)]


def keyed(rows: Iterable[dict[str, Any]], key: tuple[str, ...]) -> Rows:
    """Rows by key; SQLite's numbers without a precision are text in Arrow."""
    found: Rows = {}
    for row in rows:
        for name in row.keys() & {"credit", "total"}:
            row[name] = None if row[name] is None else Decimal(row[name])
        found[tuple(row[name] for name in key)] = row
    return found
