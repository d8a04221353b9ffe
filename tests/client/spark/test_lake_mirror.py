"""``databus mirror`` over real databases: equal at each recorded position, killed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fixtures import FreshDatabase
from tests.support.lake_mirrors import Mirror
from tests.support.processes import Processes
from tests.support.system import Workload, server_shop
from tests.support.tables import settled, source_rows, started, write

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

MIRRORED = ("order_lines", "stock")


@pytest.fixture
def database(request: pytest.FixtureRequest) -> tuple[str, FreshDatabase]:
    kind = request.param
    return kind, request.getfixturevalue(f"{kind}_database")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("database", "form", "dies_at"),
    [("mariadb", "delta", ("written", "committed")), ("postgres", "iceberg", ())],
    indirect=["database"],
)
def test_a_mirror_equals_its_source_at_each_recorded_position(
    spark: Any,
    tmp_path: Path,
    processes: Processes,
    database: tuple[str, FreshDatabase],
    form: str,
    dies_at: tuple[str, ...],
) -> None:
    kind, server = database
    shop, url = server_shop(kind, server)
    system = started(tmp_path, processes, shop, url)
    write(system, 15)
    mirror = Mirror(system, form, tmp_path / "lake", MIRRORED)
    in_process = mirror.database(spark)
    with Workload(shop, per_s=50):
        for step in dies_at:
            mirror.dies_at(step)
        for _ in range(2):
            mirror.run(in_process)
    if kind == "postgres":  # an unchanged value outside its row is not in the stream
        server.execute("ALTER TABLE stock ALTER photo SET STORAGE EXTERNAL")
        server.execute(
            "UPDATE stock SET photo = decode(repeat('ab', 9000), 'hex') WHERE sku = 'SKU-001'"
        )
        settled(system)
        mirror.run(in_process)
        server.execute("UPDATE stock SET on_hand = 77 WHERE sku = 'SKU-001'")
    server.execute("ALTER TABLE stock ADD COLUMN extra BIGINT")
    server.execute("UPDATE stock SET extra = 7 WHERE sku = 'SKU-002'")
    server.execute("TRUNCATE TABLE order_lines")
    write(system, 5)
    done = mirror.run(in_process)
    assert done["order_lines"].kind == "whole" and done["stock"].kind == "changes"
    write(system, 5)
    mirror.run(in_process)
    for table in MIRRORED:
        assert mirror.rows(table) == source_rows(system, table)
        assert mirror.assert_equal_at_recorded(table) >= 3
    server.execute("ALTER TABLE stock DROP COLUMN weight")
    server.execute("UPDATE stock SET on_hand = 3 WHERE sku = 'SKU-003'")
    settled(system)
    assert mirror.run(mirror.database(spark))["stock"].kind == "whole"
    assert mirror.rows("stock") == source_rows(system, "stock")
