"""What tests of open tables and of Spark share: a system, its tables by its own reader, merges."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.merging.spark_merges import SparkMerges
from databus.bootstrap.processes.bootstrap_processes import apply_round
from databus.cli.demo.shop import TABLES, Rows, Shop
from databus.client.tables.arrow_rows import RowDecoder
from databus.client.tables.table_reader import Range, TableAddress, TableReader
from databus.common import config
from databus.common.checkpoint import Position
from databus.common.errors import LogTooYoung, NotSeeded, UnknownSource
from tests.support.processes import Processes
from tests.support.system import System, sqlite_shop, wait_for
from tests.support.waiting import PATIENCE

BY_SIZE = 'segment_every = "1h"\nsegment_bytes = "4KiB"\nretention_bytes = "1GiB"\nrun_grace = "0s"'
"""Segments of a dozen transactions, the last ones in the hot log; what was merged goes at once."""
ROUNDS = 5


def started(
    folder: Path,
    processes: Processes,
    shop: Shop,
    url: str,
    *,
    bootstrap: str = 'segment_every = "1s"',
    **options: Any,
) -> System:
    """Relay and bootstrap (without applier) over a shop; ``bootstrap`` is when it seals."""
    system = System(folder, shop, url, processes, **options)
    written = system.config.read_text()
    assert 'segment_every = "1s"' in written
    system.config.write_text(written.replace('segment_every = "1s"', bootstrap))
    system.start_relay()
    system.start_bootstrap("--no-apply").wait_ready(f"{system.bootstrap_url}/readyz", 90)
    return system


@contextlib.contextmanager
def sqlite_system(folder: Path) -> Iterator[System]:
    """``started`` over an SQLite file, until the block ends."""
    processes = Processes(folder)
    try:
        shop, url = sqlite_shop(folder / "shop.db")
        yield started(folder, processes, shop, url)
    finally:
        processes.end_all()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10 * PATIENCE) as answer:
        return json.loads(answer.read())


def name_of(system: System, table: str) -> str:
    return f"{system.shop.dialect.namespace}.{table}"


def write(system: System, steps: int) -> Position:
    """Some transactions; returns where they end, once the bootstrap has them."""
    with system.shop.session() as step:
        for _ in range(steps):
            step()
    return settled(system)


def write_segments(system: System, count: int) -> Position:
    """Transactions that become so many segments of like size, and some that stay in the log."""
    had = len(kinds(system))
    while len(kinds(system)) < had + count:
        write(system, 8)
    end = write(system, 3)
    while not store_of(system)["log"]["frame_bytes"]:
        end = write(system, 1)
    return end


def merge(system: System, spark: Any, *, end_leases: bool = True, **changed: Any) -> None:
    """What ``databus apply --once`` does, with a Spark that runs and some settings changed.

    The leases of reads of Spark that are over end before it, so that what retires is deleted.
    """
    section = config.load(system.config).bootstrap
    assert section is not None
    for note in (section.data_dir / "shop").glob("readers-lease-*") if end_leases else ():
        note.unlink()
    changed_section = section.model_copy(update=changed)
    assert apply_round(changed_section, Stores(section).begun(), SparkMerges(spark)) == {}


def merge_all(system: System, spark: Any, *, end_leases: bool = True) -> None:
    """Merge until no segment is left; which are merged at once depends on their sizes."""
    for _ in range(ROUNDS):
        merge(system, spark, end_leases=end_leases)
        if "segment" not in kinds(system):
            assert set(kinds(system)) == {"base", "delta"}
            return
        write_segments(system, 1)
    raise AssertionError(f"there are still segments: {kinds(system)}")


def forget(system: System, spark: Any) -> None:
    """Write and merge until the base and one new segment are all that is kept."""
    for _ in range(ROUNDS):
        write_segments(system, 1)
        merge(system, spark, retention_bytes=1)
        if kinds(system) == ["base", "segment"]:
            return
    raise AssertionError(f"more is kept: {kinds(system)}")


def store_of(system: System) -> Any:
    """What the bootstrap server says of the database."""
    return get(f"{system.bootstrap_url}/v1/status")["databases"][0]


def kinds(system: System) -> list[str]:
    """The kinds of the runs: the base, then the chain from its oldest on."""
    return [run["kind"] for run in store_of(system)["runs"]]


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
    whole = Range("state", None, reader.target(), reader.clock)
    decoder = RowDecoder(schema, reader.schema_of)
    return [row for batch in reader.batches(whole, decoder) for row in batch.to_pylist()]


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
