"""Spark over a real relay and a real bootstrap server: reads, changes, streams."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.merging.process_merges import ProcessMerges
from databus.bootstrap.processes.bootstrap_processes import apply_round
from databus.cli.demo.shop import TABLES, Rows
from databus.common import config
from databus.common.checkpoint import Position
from tests.support.exports import FORMATS, assert_equal, export
from tests.support.fixtures import FreshDatabase
from tests.support.processes import Processes
from tests.support.spark_stream import KeyedSink, query_to
from tests.support.system import System, server_shop, sqlite_shop, wait_for
from tests.support.tables import (
    BY_SIZE,
    forget,
    get,
    keyed,
    kinds,
    merge_all,
    name_of,
    settled,
    source_rows,
    started,
    write,
    write_segments,
)
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def system(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system over an SQLite file for all tests of this file; its ring is small.

    It has a base, the chain before which is gone, segments and a hot log; tests merge further.
    """
    folder = tmp_path_factory.mktemp("spark")
    processes = Processes(folder)
    try:
        shop, url = sqlite_shop(folder / "shop.db")
        found = started(folder, processes, shop, url, bootstrap=BY_SIZE, ring_bytes="256KiB")
        write_segments(found, 4)
        merge_all(found, spark)
        forget(found, spark)
        write_segments(found, 1)
        yield found
    finally:
        processes.end_all()


def options(system: System, table: str, **more: Any) -> dict[str, str]:
    given = {
        "database": "shop",
        "source": name_of(system, table),
        "relays": system.relay_url,
        "bootstraps": system.bootstrap_url,
    }
    return given | {name: str(value) for name, value in more.items()}


def read(spark: Any, system: System, table: str, **more: Any) -> Any:
    return spark.read.format("databus").options(**options(system, table, **more)).load()


def rows_of(frame: Any, *, own: bool = False) -> list[dict[str, Any]]:
    """The rows as dicts, as Arrow gives them; without the stream's own columns."""
    found = frame.toArrow().to_pylist()
    return [{n: v for n, v in row.items() if own or not n.startswith("_")} for row in found]


def served_rows(system: System) -> int:
    return int(get(f"{system.bootstrap_url}/v1/status")["databases"][0]["served"]["rows"])


def test_a_read_is_the_source_typed_by_its_schema(spark: Any, system: System) -> None:
    write_segments(system, 2)
    runs = kinds(system)
    assert runs[0] == "base" and runs[-1] == "segment", "and something is in the hot log"
    for table in ("order_lines", "stock"):
        key = TABLES[table]
        frame = read(spark, system, table, partitions=3)
        found = rows_of(frame)
        assert keyed(found, key) == source_rows(system, table)
        assert len(found) == len(source_rows(system, table))
    assert dict(frame.dtypes) == {
        "sku": "string",
        "on_hand": "bigint",
        "photo": "binary",
        "weight": "double",
    }


def test_states_of_the_past_and_changes_between_two_positions(spark: Any, system: System) -> None:
    first = write(system, 30)
    before = source_rows(system, "orders")
    second = write(system, 30)
    after = source_rows(system, "orders")
    assert keyed(rows_of(read(spark, system, "orders", scn=first)), ("id",)) == before
    net = rows_of(read(spark, system, "orders", since=first, until=second), own=True)
    assert after_changes(before, net) == after
    assert len({row["id"] for row in net}) == len(net)
    every = rows_of(read(spark, system, "orders", since=first, until=second, mode="all"), own=True)
    positions = [(row["_scn"], row["_seq"]) for row in every]
    assert len(set(positions)) == len(positions) >= len(net)
    assert all(first < Position(*one) <= second for one in positions)
    last = max(every, key=lambda row: (row["_scn"], row["_seq"]))
    moment = last["_commit_time"].isoformat().replace("+00:00", "Z")
    timed = read(spark, system, "orders", since=first, until=moment, mode="all")
    assert timed.count() == len(every)


def test_changes_are_read_from_merged_runs_and_states_within_them_are_refused(
    spark: Any, system: System
) -> None:
    write_segments(system, 1)
    before, first = source_rows(system, "orders"), settled(system)
    write_segments(system, 4)
    merge_all(system, spark)
    write_segments(system, 1)
    net = rows_of(read(spark, system, "orders", since=first), own=True)
    assert len({row["id"] for row in net}) == len(net)
    assert after_changes(before, net) == source_rows(system, "orders")
    assert keyed(rows_of(read(spark, system, "orders")), ("id",)) == source_rows(system, "orders")
    for more in ({"scn": first}, {"since": first, "mode": "all"}):
        with pytest.raises(Exception, match="LogTooYoung"):
            read(spark, system, "orders", relays="", **more).collect()


def test_rows_read_from_files_are_those_of_the_server(spark: Any, system: System) -> None:
    first = write(system, 20)
    write_segments(system, 4)
    merge_all(system, spark)
    past = write(system, 10)
    write(system, 10)
    ranges: list[dict[str, Any]] = [{}, {"scn": past}, {"since": first}]
    for more in ranges:
        direct, over_http = (
            rows_of(read(spark, system, "orders", files=use, metadata="true", **more), own=True)
            for use in ("always", "never")
        )
        assert by_position(direct) == by_position(over_http)
        if not more:
            assert len(direct) == len(source_rows(system, "orders"))
    both = read(spark, system, "order*", files="always", columns="_source,id,order_id")
    counts = Counter(row["_source"] for row in both.collect())
    names = ("orders", "order_lines")
    assert counts == {name_of(system, one): len(source_rows(system, one)) for one in names}


def by_position(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["_scn"], row["_seq"]))


def test_what_a_task_reads_stays_though_it_is_merged_meanwhile(spark: Any, system: System) -> None:
    from databus.client.spark.data_source import DatabusDataSource

    write_segments(system, 2)
    expected = source_rows(system, "orders")
    source = DatabusDataSource(options(system, "orders", files="always", relays=""))
    reader = source.reader(source.schema())
    parts = reader.partitions()
    write_segments(system, 4)
    merge_all(system, spark, end_leases=False)
    rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert keyed(rows, ("id",)) == expected
    assert len(rows) == len(expected)


def test_runs_are_compacted_inside_a_running_job_that_reads_their_files(
    spark: Any, system: System, tmp_path: Path
) -> None:
    write_segments(system, 2)
    merge_all(system, spark)
    expected = {name_of(system, one): len(source_rows(system, one)) for one in TABLES}
    section = config.load(system.config).bootstrap
    assert section is not None
    store = Stores(section).begun()["shop"]
    begun, compacted = tmp_path / "begun", tmp_path / "compacted"
    begun.mkdir()

    def waiting(batches: Iterator[Any]) -> Iterator[Any]:
        """In a task whose first rows have been read; there are more tasks than cores."""
        import os
        import time

        for number, batch in enumerate(batches):
            (begun / f"{os.getpid()}-{number}").touch()
            while not compacted.exists():
                time.sleep(0.02)
            yield batch

    frame = read(spark, system, "*", files="always", columns="_source", relays="")
    job = frame.mapInArrow(waiting, frame.schema)
    base = store.read().base
    assert base is not None
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: Counter(row["_source"] for row in job.collect()))
        try:
            wait_for(lambda: any(begun.iterdir()) or reading.done(), "a task has read rows", 60)
            write_segments(system, 4)
            changed = section.model_copy(update={"run_grace": 0.0})
            merges = ProcessMerges(tmp_path)
            assert apply_round(changed, {"shop": store}, merges, full=True) == {}
            now = store.read()
            assert now.base is not None and now.base.id != base.id
            assert base.id in {one.run.id for one in now.retired}, "the lease retains it"
        finally:
            compacted.touch()
        assert reading.result(120) == expected
    for note in (section.data_dir / "shop").glob("readers-lease-*"):
        note.unlink()
    assert apply_round(changed, {"shop": store}, merges) == {}
    assert store.read().find(base.id) is None, "its files are deleted when the lease has ended"


def after_changes(before: Rows, changes: list[dict[str, Any]]) -> Rows:
    """The orders after changes to them, which come in any order."""
    state = dict(before)
    for row in sorted(changes, key=lambda row: (row["_scn"], row["_seq"])):
        plain = {name: value for name, value in row.items() if not name.startswith("_")}
        if row["_op"] == "d":
            state.pop((row["id"],), None)
        else:
            state |= keyed([plain], ("id",))
    return state


def test_filters_and_columns_make_the_request_smaller(spark: Any, system: System) -> None:
    end = write(system, 30)
    keys = sorted(source_rows(system, "orders"))

    def counted(table: str, condition: str, **more: Any) -> tuple[int, int]:
        """How many rows Spark finds, and how many the server sent for that."""
        frame = read(spark, system, table, partitions=1, **more)
        before = served_rows(system)
        return frame.where(condition).count(), served_rows(system) - before

    low, high = keys[3][0], keys[8][0]
    (order, line), *_ = sorted(source_rows(system, "order_lines"))
    for table, condition, count in (
        ("orders", f"id = {keys[5][0]}", 1),
        ("orders", f"id IN ({keys[1][0]}, {keys[2][0]}, -7)", 2),
        ("orders", f"id >= {low} AND id < {high}", 5),
        ("order_lines", f"order_id = {order} AND line = {line}", 1),
    ):
        assert counted(table, condition, pushdown="true") == (count, count)
    found, sent = counted("orders", "_op = 'd'", until=end, mode="all", pushdown="true")
    plain = counted("orders", "_op = 'd'", until=end, mode="all")
    assert found == plain[0]
    assert sent < plain[1]
    frame = read(spark, system, "orders")
    assert frame.where(f"id = {keys[5][0]}").count() == 1
    assert frame.count() == len(keys), "a query's filter does not apply to the next one"
    some = read(spark, system, "orders", columns="state,id")
    assert some.columns == ["state", "id"]
    assert {(row["id"],) for row in rows_of(some)} == set(keys)
    typed = spark.read.format("databus").schema("id long, total double")
    rows = rows_of(typed.options(**options(system, "orders")).load())
    totals = {key: float(row["total"]) for key, row in source_rows(system, "orders").items()}
    assert {(row["id"],): row["total"] for row in rows} == totals


class Sink:
    """Stores each batch in a folder of its own, so that a batch that comes again replaces
    itself."""

    def __init__(self, folder: Path, dies_in: int | None = None) -> None:
        self.folder = folder
        self.dies_in = dies_in

    def __call__(self, frame: Any, batch: int) -> None:
        frame.write.mode("overwrite").parquet(str(self.folder / f"{batch:05d}"))
        if batch == self.dies_in:
            raise RuntimeError("the sink dies after it has written")

    def rows(self) -> list[list[dict[str, Any]]]:
        folders = sorted(self.folder.iterdir())
        return [pq.read_table(folder).to_pylist() for folder in folders]


def run_to_the_end(spark: Any, system: System, sink: Sink, checkpoints: Path) -> None:
    """A query over what there is now, from its checkpoint."""
    stream = spark.readStream.format("databus").options(
        **options(system, "orders", metadata="true")
    )
    query = (
        stream.load()
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(checkpoints))
        .trigger(once=True)
        .start()
    )
    query.awaitTermination()


def test_a_stream_that_dies_and_starts_again_gives_each_change_once(
    spark: Any, system: System, tmp_path: Path
) -> None:
    from pyspark.errors import StreamingQueryException

    folder = tmp_path / "out"
    begun = write(system, 20)
    run_to_the_end(spark, system, Sink(folder), tmp_path / "checkpoint")
    write(system, 30)
    dying = Sink(folder, dies_in=1)
    with pytest.raises(StreamingQueryException):
        run_to_the_end(spark, system, dying, tmp_path / "checkpoint")
    half = dying.rows()[1]
    # So much happens meanwhile that the relay's ring no longer has the batch; the log has it.
    while get(f"{system.relay_url}/v1/databases")["databases"][0]["prev"]["scn"] <= begun.scn:
        write(system, 100)
    sink = Sink(folder)
    for _ in range(2):  # the batch that died, then what came since
        run_to_the_end(spark, system, sink, tmp_path / "checkpoint")
    first, again, *rest = sink.rows()
    assert sorted(map(str, again)) == sorted(map(str, half))
    changes = [row for batch in (again, *rest) for row in batch]
    positions = [(row["_scn"], row["_seq"]) for row in changes]
    assert len(positions) == len(set(positions))
    assert after_changes({}, [*first, *changes]) == source_rows(system, "orders")


def test_a_stream_has_no_more_in_a_batch_than_its_limits(
    spark: Any, system: System, tmp_path: Path
) -> None:
    def run(name: str, **limits: Any) -> list[list[dict[str, Any]]]:
        """The batches of a query over what there is now, from its checkpoint."""
        given = options(system, "orders", metadata="true", **limits)
        sink = Sink(tmp_path / name)
        query = (
            spark.readStream.format("databus")
            .options(**given)
            .load()
            .writeStream.foreachBatch(sink)
            .option("checkpointLocation", str(tmp_path / f"{name}.checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sink.rows()

    limits: dict[str, dict[str, Any]] = {
        "events": {"maxEventsPerTrigger": 7},
        "bytes": {"maxBytesPerTrigger": "1KiB", "relays": ""},
    }
    for name, limit in limits.items():
        assert len(run(name, **limit)) == 1, "the snapshot"
    begun = settled(system)
    windows: Counter[int] = Counter()
    while len(windows) < 5:
        end = write(system, 10)
        every = read(spark, system, "orders", since=begun, until=end, mode="all", partitions=1)
        windows = Counter(row["_scn"] for row in rows_of(every, own=True))
    for name, limit in limits.items():
        snapshot, *batches = run(name, **limit)
        found = [Counter(row["_scn"] for row in batch) for batch in batches]
        assert sum(found, Counter()) == windows
        assert found == list(filled(windows, 7)) if name != "bytes" else len(found) > 1
        changes = [row for batch in batches for row in batch]
        assert after_changes({}, [*snapshot, *changes]) == source_rows(system, "orders")


def filled(windows: Counter[int], most: int) -> Iterator[Counter[int]]:
    """The windows in batches of as many events as possible, of one window at least."""
    batch: Counter[int] = Counter()
    for scn in sorted(windows):
        if batch and batch.total() + windows[scn] > most:
            yield batch
            batch = Counter()
        batch[scn] = windows[scn]
    yield batch


STALLS = {"orders": 1, "order_lines": 0}
"""In which batch the copy of a table waits to be killed: the first is the snapshot."""


@pytest.mark.faults
def test_a_stream_that_is_killed_resumes_though_its_batch_was_merged_meanwhile(
    spark: Any, system: System, tmp_path: Path
) -> None:
    processes = Processes(tmp_path)
    # Without relays, as if these had forgotten everything: their rings are not merged.
    read_options = {
        table: options(system, table, metadata="true", partitions=1, relays="") for table in STALLS
    }
    settings = {
        "scratch": str(tmp_path),
        "tables": [
            {
                "folder": str(tmp_path / table),
                "key": TABLES[table],
                "stalls_in": batch,
                "options": read_options[table],
            }
            for table, batch in STALLS.items()
        ],
    }
    command = [sys.executable, "-m", "tests.support.spark_stream", json.dumps(settings)]
    sinks = {table: KeyedSink(tmp_path / table / "sink", TABLES[table]) for table in STALLS}
    try:
        killed = processes.start_command(command, name="stream")

        def come(condition: bool) -> bool:
            if not killed.running:
                raise RuntimeError(f"the stream ended by itself:\n{killed.log[-3000:]}")
            return condition

        wait_for(lambda: come(bool(sinks["orders"].rows())), "the snapshot is in the sink")
        write(system, 30)
        wait_for(lambda: come(all(sink.is_stalled for sink in sinks.values())), "both wait")
    finally:
        processes.end_all()
    assert killed.exit_code == -signal.SIGKILL
    had = {table: sinks[table].batch(batch) for table, batch in STALLS.items()}
    write_segments(system, 4)
    merge_all(system, spark)  # no segment is left of what the batches had
    write_segments(system, 1)
    for _ in range(2):  # the batches that were killed, then what came since
        queries = [
            query_to(spark, sink, read_options[table], tmp_path / table / "checkpoint", once=True)
            for table, sink in sinks.items()
        ]
        for query in queries:
            query.awaitTermination()
    for table, sink in sinks.items():
        again = sink.batch(STALLS[table])
        # Fewer, as a rule: rows that changed again are left to the next batch.
        assert set(again) <= set(had[table])
        rows = ({n: v for n, v in row.items() if n[0] != "_"} for row in sink.rows().values())
        assert keyed(rows, TABLES[table]) == source_rows(system, table)


def test_postgresql_and_its_partial_updates(
    spark: Any, tmp_path: Path, processes: Processes, postgres_database: FreshDatabase
) -> None:
    shop, url = server_shop("postgres", postgres_database)
    postgres_database.execute("ALTER TABLE customers ALTER note TYPE text")
    postgres_database.execute("ALTER TABLE customers ALTER note SET STORAGE EXTERNAL")
    system = started(tmp_path, processes, shop, url)
    first = write(system, 10)
    large = "x" * 9000
    postgres_database.execute(f"UPDATE customers SET note = '{large}' WHERE id = 1")
    postgres_database.execute("UPDATE customers SET credit = 17.25 WHERE id IN (1, 2)")
    settled(system)
    for table, key in TABLES.items():
        assert keyed(rows_of(read(spark, system, table)), key) == source_rows(system, table)
    frame = read(spark, system, "customers", since=first)
    assert dict(frame.dtypes)["credit"] == "decimal(12,2)"
    changed = keyed(rows_of(frame), ("id",))
    assert changed[(1,)]["note"] == large
    assert changed[(1,)]["credit"] == Decimal("17.25")


def test_options_that_make_no_sense_are_refused_by_name(spark: Any, system: System) -> None:
    for more, word in (
        ({"scn": 5, "since": 3}, "do not go together"),
        ({"sinse": 3}, "sinse"),
        ({"mode": "some"}, "mode"),
        ({"files": "some"}, "files"),
        ({"maxBytesPerTrigger": "much"}, "maxBytesPerTrigger"),
        ({"columns": "none_such"}, "none_such"),
    ):
        with pytest.raises(Exception, match=word):
            read(spark, system, "orders", **more).collect()
    with pytest.raises(Exception, match="nothing_such"):
        read(spark, system, "nothing_such").collect()


STRANGERS = """
import json, os, sys
sys.path[:] = [f for f in sys.path if not os.path.isdir(os.path.join(f or ".", "databus"))]
import importlib.util
assert importlib.util.find_spec("databus") is None, "nothing of ours"
import duckdb, pandas
folder = sys.argv[1]
query = f"SELECT * FROM '{folder}/*.parquet'"
found = duckdb.sql(query).fetchall()
described = f"SELECT column_name, column_type FROM (DESCRIBE {query})"
print(json.dumps({
    "types": dict(duckdb.sql(described).fetchall()),
    "duckdb": sorted([sku, on_hand, photo and photo.hex(), weight]
                     for sku, on_hand, photo, weight in found),
    "pandas": sorted([row.sku, int(row.on_hand),
                      row.photo.hex() if isinstance(row.photo, bytes) else None, float(row.weight)]
                     for row in pandas.read_parquet(folder).itertuples()),
}))
"""


def test_an_export_is_read_by_spark_duckdb_and_pandas_that_have_nothing_of_ours(
    spark: Any, system: System, tmp_path: Path
) -> None:
    write(system, 20)
    assert export(system, "parquet", tmp_path) == ["whole"] * 4
    folders = {t: tmp_path / "shop" / name_of(system, t) / "current" for t in TABLES}
    # A session of its own lacks the format `databus`; plain Parquet does not need it.
    plain = spark.newSession()
    for table, key in TABLES.items():
        frame = plain.read.parquet(str(folders[table]))
        assert keyed(frame.toArrow().to_pylist(), key) == source_rows(system, table)
    assert dict(plain.read.parquet(str(folders["stock"])).dtypes)["weight"] == "double"

    command = [sys.executable, "-I", "-c", STRANGERS, str(folders["stock"])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = source_rows(system, "stock").values()
    expected = sorted(
        [r["sku"], r["on_hand"], r["photo"] and r["photo"].hex(), r["weight"]] for r in rows
    )
    assert found["duckdb"] == found["pandas"] == expected
    assert found["types"] == {
        "sku": "VARCHAR",
        "on_hand": "BIGINT",
        "photo": "BLOB",
        "weight": "DOUBLE",
    }


def test_an_export_reads_merged_runs_and_is_whole_again_where_they_no_longer_reach(
    spark: Any, system: System, tmp_path: Path
) -> None:
    def exported_all(kind: str) -> None:
        for form in FORMATS:
            assert export(system, form, tmp_path / form) == [kind] * 4
            assert_equal(system, form, tmp_path / form)

    write_segments(system, 1)
    exported_all("whole")
    write_segments(system, 4)
    merge_all(system, spark)
    write_segments(system, 1)
    exported_all("changes")
    for _ in range(2):  # what the export has last is in the first segment, of which nothing is left
        forget(system, spark)
    exported_all("whole")
