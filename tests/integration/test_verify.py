"""``databus verify`` on real databases that live: planted damage is found, and mended."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from databus.cli.shop import Shop, differences
from tests.support.fixtures import FreshDatabase
from tests.support.processes import Processes, http_status
from tests.support.system import System, Workload, server_shop, sqlite_shop, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]

Damage = Callable[[list[str]], None]


BINARY = "CREATE TABLE tokens (token {blob} NOT NULL PRIMARY KEY, used INT)"


@pytest.fixture(params=["sqlite", "mariadb"])
def damaged_system(
    request: pytest.FixtureRequest, tmp_path: Path, processes: Processes
) -> tuple[System, Damage]:
    """A system, and a way to change its source so that no log has it."""
    if request.param == "sqlite":
        path = tmp_path / "shop.db"
        shop, url = sqlite_shop(path)
        return System(tmp_path, shop, url, processes), lambda sql: _past_the_triggers(path, sql)
    database: FreshDatabase = request.getfixturevalue("mariadb_database")
    shop, url = server_shop("mariadb", database)

    def past_the_binlog(statements: list[str]) -> None:
        connection = database.server.connect(database.name)
        cursor = connection.cursor()
        for statement in ("SET sql_log_bin = 0", "BEGIN", *statements, "COMMIT"):
            cursor.execute(statement)
        connection.close()

    return System(tmp_path, shop, url, processes), past_the_binlog


def _past_the_triggers(path: Path, statements: list[str]) -> None:
    with sqlite3.connect(path, timeout=30, isolation_level=None) as db:
        db.execute("BEGIN IMMEDIATE")
        triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        made = triggers.fetchall()
        for name, _ in made:
            db.execute(f'DROP TRIGGER "{name}"')
        for statement in statements:
            db.execute(statement)
        for _, sql in made:
            db.execute(sql)
        db.execute("COMMIT")
    db.close()


def verify(
    processes: Processes, system: System, *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    done = processes.run(
        "verify", "-c", system.config, "--database", "shop", "--json", *options, timeout_s=120
    )
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return done, {report["source"].partition(".")[2]: report for report in reports}


def first_ids(shop: Shop, table: str) -> list[Any]:
    rows = shop.rows()[f"{shop.dialect.namespace}.{table}"]
    return sorted(key[0] for key in rows)


def test_planted_damage_is_found_named_and_mended_while_the_source_is_written(
    damaged_system: tuple[System, Damage], processes: Processes
) -> None:
    system, damage = damaged_system
    connection = system.shop.connect()
    cursor = connection.cursor()
    cursor.execute(BINARY.format(blob=system.shop.dialect.blob))
    cursor.execute("INSERT INTO tokens VALUES (x'00ff', 1), (x'', 2), (x'5c78', 3)")
    connection.commit()
    connection.close()
    system.start_relay()
    system.start_bootstrap()
    with system.shop.session() as step:
        for _ in range(300):
            step()
    wait_for(lambda: http_status(f"{system.bootstrap_url}/readyz") == 200, "the log has begun")
    wait_for(lambda: "seeded" in _sources(system, processes), "the copy is whole")
    system.start_consumer()
    with Workload(system.shop, per_s=50):
        done, reports = verify(processes, system)
    assert done.returncode == 0, done.stderr + done.stdout
    assert all(report["equal"] and not report["in_flux"] for report in reports.values())
    assert sum(report["rows"] for report in reports.values()) > 300

    customers = first_ids(system.shop, "customers")
    damage(
        [
            f"UPDATE customers SET name = 'renamed' WHERE id = {customers[0]}",
            "INSERT INTO customers (id, name) VALUES (900001, 'unheard of')",
            f"DELETE FROM customers WHERE id = {customers[1]}",
            "UPDATE tokens SET used = 7 WHERE token = x'00ff'",
            "DELETE FROM tokens WHERE token = x'5c78'",
        ]
    )
    done, reports = verify(processes, system)
    assert done.returncode == 4, done.stderr + done.stdout
    found = {(one["verdict"], one["key"][0]) for one in reports["customers"]["differences"]}
    assert found == {
        ("changed", customers[0]),
        ("missing", 900001),
        ("extra", customers[1]),
    }
    assert [r["differences"] for r in reports["customers"]["ranges"]] == [2, 1]
    tokens = {(one["verdict"], one["key"][0]) for one in reports["tokens"]["differences"]}
    assert tokens == {("changed", "AP8="), ("extra", "XHg=")}
    damaged = ("customers", "tokens")
    assert all(report["equal"] for name, report in reports.items() if name not in damaged)

    with Workload(system.shop, per_s=50):
        done, reports = verify(processes, system, "--repair")
    assert done.returncode == 0, done.stderr + done.stdout
    assert reports["customers"]["repaired"]
    assert reports["tokens"]["repaired"]
    done, reports = verify(processes, system)
    assert done.returncode == 0, done.stderr + done.stdout
    assert all(not report["differences"] for report in reports.values())
    # Those who follow the stream were mended by the same rows and deletions.
    tokens_of = f"{system.shop.dialect.namespace}.tokens"
    expected = system.shop.rows()
    wait_for(
        lambda: (
            not differences(expected, {**system.copy(), tokens_of: {}})
            and {key: row["used"] for key, row in system.copy()[tokens_of].items()}
            == {(b"\x00\xff",): 7, (b"",): 2}
        ),
        "the consumer's copy is mended",
    )


def _sources(system: System, processes: Processes) -> str:
    return processes.run("status", system.bootstrap_url).stdout
