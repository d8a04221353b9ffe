"""The pipelines of examples/spark over a real system: equal to what the source's rows give."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from databus.client.exports.lake_files import Layout
from databus.client.spark.table_merge import MergeSizes
from tests.support.lake_mirrors import Mirror, changes_of
from tests.support.processes import Processes
from tests.support.system import System, sqlite_shop
from tests.support.tables import name_of, settled, source_rows, started, write

EXAMPLES = Path(__file__).parents[3] / "examples" / "spark"

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A shop with an outbox, in SQLite, for all tests of this file."""
    folder = tmp_path_factory.mktemp("examples")
    processes = Processes(folder)
    try:
        shop, url = sqlite_shop(folder / "shop.db")
        with closing(shop.connect()) as connection:
            connection.execute(
                "CREATE TABLE outbox (id INTEGER PRIMARY KEY, topic VARCHAR(20), "
                "payload VARCHAR(200))"
            )
        found = started(folder, processes, shop, url)
        write(found, 20)
        yield found
    finally:
        processes.end_all()


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def example(name: str) -> Any:
    return importlib.import_module(name)


def given(system: System, table: str, to: Path, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        database="shop",
        source=name_of(system, table),
        relays=system.relay_url,
        bootstraps=system.bootstrap_url,
        to=str(to),
        every=None,
        **more,
    )


def stored(to: Path) -> list[dict[str, Any]]:
    return list(DeltaTable(str(to / "table")).to_pyarrow_table().to_pylist())


@pytest.mark.usefixtures("examples")
def test_hourly_totals_are_those_of_the_present_orders(
    spark: Any, system: System, tmp_path: Path
) -> None:
    totals = example("hourly_totals").totals
    for _ in range(2):
        write(system, 15)
        totals(spark, given(system, "orders", tmp_path)).awaitTermination()
        expected: dict[str, tuple[int, Decimal]] = {}
        for row in source_rows(system, "orders").values():
            count, total = expected.get(row["placed"][:13], (0, Decimal(0)))
            expected[row["placed"][:13]] = count + 1, total + row["total"]
        hours = [row for row in stored(tmp_path) if row["kind"] == "hour"]
        assert {row["hour"]: (row["count"], row["total"]) for row in hours} == expected


@pytest.mark.usefixtures("examples")
def test_the_history_of_rows_has_each_version(spark: Any, system: System, tmp_path: Path) -> None:
    begun = settled(system)
    wanted = given(system, "orders", tmp_path, key="id", columns="id,state")
    example("row_history").history(spark, wanted).awaitTermination()
    write(system, 15)
    example("row_history").history(spark, wanted).awaitTermination()
    rows = stored(tmp_path)
    present = {(row["id"],): row["state"] for row in rows if row["valid_to"] is None}
    assert present == {key: row["state"] for key, row in source_rows(system, "orders").items()}
    made = {(row["scn"], row["seq"]): row["valid_to"] for row in rows if row["scn"] > begun.scn}
    assert made == dict(versions(changes_of(system, "orders", begun)))


def versions(changes: list[dict[str, Any]]) -> Iterator[tuple[tuple[int, int], Any]]:
    """The position of each version of a row, and when it ended."""
    for at, row in enumerate(changes):
        if row["_op"] != "d":
            later = (one for one in changes[at + 1 :] if one["id"] == row["id"])
            ended = next(later, {"_commit_time": None})
            yield (row["_scn"], row["_seq"]), ended["_commit_time"]


@pytest.mark.usefixtures("examples")
def test_messages_of_the_outbox_arrive_once_by_topic(
    spark: Any, system: System, tmp_path: Path
) -> None:
    sent: dict[int, tuple[str, str]] = {}

    def send(topic: str) -> None:
        number = len(sent) + 1
        payload = json.dumps({"kind": "paid", "order": number})
        with closing(system.shop.connect()) as connection:
            connection.execute(
                "INSERT INTO outbox (id, topic, payload) VALUES (?, ?, ?)", (number, topic, payload)
            )
            if number % 2:
                connection.execute("DELETE FROM outbox WHERE id = ?", (number,))
        sent[number] = (topic, "paid")

    for topics in (("orders", "stock"), ("orders", "orders", "mail")):
        for topic in topics:
            send(topic)
        write(system, 1)
        example("outbox").outbox(spark, given(system, "outbox", tmp_path)).awaitTermination()
    rows = stored(tmp_path)
    assert {row["id"]: (row["topic"], row["kind"]) for row in rows} == sent
    assert len(rows) == len(sent)


@pytest.mark.usefixtures("examples")
def test_a_mirror_with_a_step_of_its_own_and_a_layout(
    spark: Any, system: System, tmp_path: Path
) -> None:
    mirror = Mirror(system, "delta", tmp_path / "lake", ("customers", "orders"))
    layouts = {name_of(system, "orders"): Layout(("state",), ("total",))}
    database = mirror.database(
        spark,
        transform=example("mirror_step").without_names,
        layouts=layouts,
        sizes=MergeSizes(file_rows=20, tasks=2),
    )
    for _ in range(2):
        write(system, 15)
        mirror.run(database)
        assert mirror.rows("orders") == source_rows(system, "orders")
        with_credit = {
            key for key, row in source_rows(system, "customers").items() if (row["credit"] or 0) > 0
        }
        customers = mirror.rows("customers")
        assert set(customers) == with_credit
    assert set(next(iter(customers.values()))) == {"id", "credit", "joined", "pseudonym"}
    files = mirror.delta("orders").get_add_actions(flatten=True)
    assert len(set(files.column("partition.state").to_pylist())) > 1
