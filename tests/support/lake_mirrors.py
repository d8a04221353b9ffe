"""Mirrors for tests: passes in this process or in one that dies, and what a mirror must hold."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from databus.cli.demo.shop import TABLES, Rows
from databus.client.exports.export_formats import Lake
from databus.client.exports.iceberg_table import open_catalog
from databus.client.spark.lake_mirror import MirrorOptions
from databus.client.spark.mirror_passes import MirroredDatabase
from databus.client.spark.table_merge import MergeSizes
from databus.client.tables.arrow_rows import METADATA, RowDecoder
from databus.client.tables.table_reader import Range, TableReader
from databus.common import config
from databus.common.checkpoint import Position
from tests.support.system import System
from tests.support.tables import address, keyed, name_of
from tests.support.waiting import PATIENCE

DYING = """
import functools, os, signal, sys
from databus.client.spark import lake_mirror
from databus.cli.main import cli

def die(step):
    if step == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)

lake_mirror.MirrorOptions = functools.partial(lake_mirror.MirrorOptions, reached=die)
cli(sys.argv[2:])
"""


@dataclass
class Mirror:
    """A mirror of some of a shop's tables."""

    system: System
    form: str
    to: Path
    tables: Sequence[str]

    def database(self, spark: Any, **options: Any) -> MirroredDatabase:
        """The mirror in this process; two tasks read a table."""
        lake = Lake(self.form, str(self.to), config.load(self.system.config))
        sizes = options.pop("sizes", MergeSizes(tasks=2))
        layouts = options.pop("layouts", {})
        return MirroredDatabase(
            spark,
            lake,
            "shop",
            self.system.bootstrap_url,
            MirrorOptions(sizes, **options),
            layouts,
        )

    def run(self, database: MirroredDatabase) -> dict[str, Any]:
        """One pass, which succeeds; what it did to each table."""
        outcomes: dict[str, Any] = {}
        names = {name_of(self.system, table): table for table in self.tables}
        failed = database.run(list(names), lambda name, what: outcomes.update({names[name]: what}))
        assert not failed, outcomes
        return outcomes

    def dies_at(self, step: str) -> None:
        """``databus mirror --once`` in a process that is killed when it reaches a step."""
        sources = ",".join(name_of(self.system, table) for table in self.tables)
        scratch = self.to.parent / "dying"
        scratch.mkdir(exist_ok=True)
        command = [sys.executable, "-c", DYING, step, "mirror", "-c", str(self.system.config)]
        command += ["--once", "--format", self.form, "--to", str(self.to), "--source", sources]
        command += ["--master", "local[2]", "--spark", f"spark.local.dir={scratch}"]
        command += ["--spark", f"spark.driver.extraJavaOptions=-Djava.io.tmpdir={scratch}"]
        done = subprocess.run(command, capture_output=True, timeout=90 * PATIENCE, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-3000:]

    def delta(self, table: str) -> DeltaTable:
        """The table as ``deltalake`` opens it."""
        return DeltaTable(str(self.to / "shop" / name_of(self.system, table)))

    def rows(self, table: str) -> Rows:
        """What the format's own reader finds."""
        return next(iter(self.versions(table, 1)))[1]

    def versions(self, table: str, count: int) -> Iterator[tuple[Position, Rows]]:
        """The newest states of a table, with the position that each one has recorded."""
        for position, read in list(self._states(table))[-count:]:
            found = read().to_pylist()
            rows = keyed(found, TABLES[table])
            assert len(rows) == len(found), "a key came twice"
            yield position, rows

    def _states(self, table: str) -> Iterator[tuple[Position, Callable[[], Any]]]:
        name = name_of(self.system, table)
        if self.form == "delta":
            url = str(self.to / "shop" / name)
            for one in reversed(DeltaTable(url).history()):
                if "databus.scn" in one:
                    old = DeltaTable(url, version=one["version"])
                    yield _position(one), old.to_pyarrow_table
            return
        loaded = open_catalog(self.to / "shop").load_table(name)
        for snapshot in loaded.snapshots():
            scan = loaded.scan(snapshot_id=snapshot.snapshot_id)
            assert snapshot.summary is not None
            yield _position(snapshot.summary.additional_properties), scan.to_arrow

    def assert_equal_at_recorded(self, table: str, count: int = 10) -> int:
        """Each recorded state is what the stream's changes give up to there; how many there are."""
        checked = 0
        for position, rows in self.versions(table, count):
            names = set(next(iter(rows.values()), {}))
            expected = {
                key: {name: value for name, value in row.items() if name in names}
                for key, row in replayed(self.system, table, position).items()
            }
            assert rows == expected, f"{table} at {position}"
            checked += 1
        return checked


def _position(found: dict[str, str]) -> Position:
    return Position(int(found["databus.scn"]), int(found["databus.seq"]))


def changes_of(
    system: System, table: str, since: Position | None = None, until: Position | None = None
) -> list[dict[str, Any]]:
    """Every change of a table between two positions, in order; by default all there are."""
    reader = TableReader(address(system, table))
    decoder = RowDecoder(reader.schema(), reader.schema_of, metadata=METADATA.names)
    begin = reader.oldest() if since is None else since
    every = Range("all", begin, until or reader.target(), reader.clock)
    found = [row for batch in reader.batches(every, decoder) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: (row["_scn"], row["_seq"]))


def replayed(system: System, table: str, until: Position) -> Rows:
    """The rows after every change up to a position, one after the other."""
    state: Rows = {}
    for row in changes_of(system, table, until=until):
        own = {name: value for name, value in row.items() if not name.startswith("_")}
        ((key, new),) = keyed([own], TABLES[table]).items()
        if row["_op"] == "t":
            state.clear()
        elif row["_op"] == "d":
            state.pop(key, None)
        else:
            had = state.get(key, {})
            state[key] = new | {name: had.get(name) for name in row["_absent"] or ()}
    return state
