"""``databus verify`` on real databases under load: planted damage is found and repaired.

On MariaDB the table was changed so that no log has it; on PostgreSQL it is the copy that is wrong.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log.hot_log import HotLog
from databus.cli.demo.shop import Shop, differences
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import SchemaSet
from tests.support.fixtures import FreshDatabase
from tests.support.processes import Processes, http_status
from tests.support.system import System, Workload, server_shop, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]

Found = set[tuple[str, Any]]
"""Verdicts, each with the first column of its key."""
Damage = Callable[[list[Any]], tuple[Found, Found]]
"""Spoils something, given the customers; what has to be found of customers and of tokens."""

BINARY = "CREATE TABLE tokens (token {blob} NOT NULL PRIMARY KEY, used INT)"
UNHEARD_OF = 900001


@pytest.fixture(params=["mariadb", "postgres"])
def damaged_system(
    request: pytest.FixtureRequest, tmp_path: Path, processes: Processes
) -> tuple[System, Damage]:
    """A system that is to be started, and a way to make copy and source differ."""
    database: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    shop, url = server_shop(request.param, database)
    system = System(tmp_path, shop, url, processes)

    def past_the_binlog(customers: list[Any]) -> tuple[Found, Found]:
        statements = (
            f"UPDATE customers SET name = 'renamed' WHERE id = {customers[0]}",
            f"INSERT INTO customers (id, name) VALUES ({UNHEARD_OF}, 'unheard of')",
            f"DELETE FROM customers WHERE id = {customers[1]}",
            "UPDATE tokens SET used = 7 WHERE token = x'00ff'",
            "DELETE FROM tokens WHERE token = x'5c78'",
        )
        connection = database.server.connect(database.name)
        cursor = connection.cursor()
        for statement in ("SET sql_log_bin = 0", "BEGIN", *statements, "COMMIT"):
            cursor.execute(statement)
        connection.close()
        return (
            {("changed", customers[0]), ("missing", UNHEARD_OF), ("extra", customers[1])},
            {("changed", "AP8="), ("extra", "XHg=")},
        )

    def in_the_log(customers: list[Any]) -> tuple[Found, Found]:
        (bootstrap,) = (one for one in processes.started if "bootstrap" in one.arguments)
        bootstrap.stop()
        forge(tmp_path / "bootstrap" / "shop" / "log", customers)
        bootstrap.start()
        bootstrap.wait_ready(f"{system.bootstrap_url}/readyz")
        return (
            {("changed", customers[0]), ("extra", UNHEARD_OF), ("missing", customers[1])},
            {("changed", "AP8="), ("missing", "XHg=")},
        )

    return system, past_the_binlog if request.param == "mariadb" else in_the_log


def forge(folder: Path, customers: list[Any]) -> None:
    """Append a transaction that never was to a log without a writer."""
    log = HotLog(folder)
    schemas = SchemaSet(log.schemas())
    # PostgreSQL's commits are at least eight bytes apart.
    window = WindowBuilder(log.state().last.scn + 1, 1)

    def event(op: Op, table: str, key: Any, **values: Any) -> None:
        schema = schemas.latest(f"public.{table}")
        assert schema is not None
        row = {column.name: values.get(column.name) for column in schema.columns}
        name = schema.key_columns[0].name
        after = None if op == Op.DELETE else schema.encode_row({**row, name: key})
        window.event(
            op, schema.source_id, schema.fingerprint, schema.encode_key((key,)), after=after
        )

    event(Op.UPDATE, "customers", customers[0], name="renamed")
    event(Op.INSERT, "customers", UNHEARD_OF, name="unheard of")
    event(Op.DELETE, "customers", customers[1])
    event(Op.UPDATE, "tokens", b"\x00\xff", used=8)
    event(Op.DELETE, "tokens", b"\x5c\x78")
    log.append(window.end(), 1)
    log.close()


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


def test_planted_damage_is_found_and_repaired_while_the_source_is_written(
    damaged_system: tuple[System, Damage], processes: Processes
) -> None:
    system, damage = damaged_system
    connection = system.shop.connect()
    cursor = connection.cursor()
    cursor.execute(BINARY.format(blob=system.shop.dialect.blob))
    quoted = "'\\x{}'" if system.shop.dialect.name == "postgres" else "x'{}'"
    tokens = ((quoted.format(token), used) for token, used in (("00ff", 1), ("", 2), ("5c78", 3)))
    cursor.execute("INSERT INTO tokens VALUES " + ", ".join(f"({t}, {used})" for t, used in tokens))
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

    customers, tokens = damage(first_ids(system.shop, "customers"))
    done, reports = verify(processes, system)
    assert done.returncode == 4, done.stderr + done.stdout
    for name, expected in (("customers", customers), ("tokens", tokens)):
        report = reports[name]
        assert {(one["verdict"], one["key"][0]) for one in report["differences"]} == expected
        # What the source has not lies in no range of it.
        extra = sum(result == "extra" for result, _ in expected)
        counts = {r["at_source"]: r["differences"] for r in report["ranges"]}
        assert counts == {True: len(expected) - extra, **({False: extra} if extra else {})}
    damaged = ("customers", "tokens")
    assert all(report["equal"] for name, report in reports.items() if name not in damaged)
    namespace = system.shop.dialect.namespace
    done, alone = verify(processes, system, "--source", f"{namespace}.tokens")
    assert done.returncode == 4, done.stderr + done.stdout
    assert list(alone) == ["tokens"]
    done, alone = verify(processes, system, "--source", f"{namespace}.orders")
    assert (done.returncode, list(alone)) == (0, ["orders"]), "the damage lies elsewhere"

    with Workload(system.shop, per_s=50):
        done, reports = verify(processes, system, "--repair")
    assert done.returncode == 0, done.stderr + done.stdout
    assert reports["customers"]["repaired"]
    assert reports["tokens"]["repaired"]
    done, reports = verify(processes, system)
    assert done.returncode == 0, done.stderr + done.stdout
    assert all(not report["differences"] for report in reports.values())
    # The same rows and deletions repaired the copies of the stream's readers.
    tokens_of = f"{system.shop.dialect.namespace}.tokens"
    expected = system.shop.rows()
    with contextlib.closing(system.shop.connect()) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT token, used FROM tokens")
        used = {(bytes(token),): number for token, number in cursor.fetchall()}
    wait_for(
        lambda: (
            not differences(expected, {**system.copy(), tokens_of: {}})
            and {key: row["used"] for key, row in system.copy()[tokens_of].items()} == used
        ),
        "the consumer's copy is repaired",
    )


def _sources(system: System, processes: Processes) -> str:
    return processes.run("status", system.bootstrap_url).stdout
