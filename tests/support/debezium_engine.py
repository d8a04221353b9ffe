"""Debezium's own engine, to compare our records with: tests/support/DebeziumRecords.java."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.maven_jars import jars_or_skip
from tests.support.waiting import PATIENCE

_PROGRAM = Path(__file__).with_name("DebeziumRecords.java")
_LAST = 1_000_000
"""The row of ``marker`` that ends a workload."""


@dataclass(frozen=True)
class EngineRecord:
    """A record of the engine; key and value with their schema and payload."""

    topic: str
    key: Mapping[str, Any] | None
    value: Mapping[str, Any] | None
    headers: Mapping[str, str]


def _properties(product: str, url: str, database: str) -> dict[str, str]:
    parts = urlsplit(url)
    found = {
        "name": "databus",
        "topic.prefix": "shop",
        "database.hostname": str(parts.hostname),
        "database.port": str(parts.port),
        "database.user": str(parts.username),
        "database.password": str(parts.password),
        "snapshot.mode": "no_data",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "provide.transaction.metadata": "true",
        "skipped.operations": "none",
    }
    if product == "postgresql":
        return found | {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "database.dbname": database,
            "plugin.name": "pgoutput",
            "slot.name": database,
            "slot.drop.on.stop": "true",
            "publication.name": f"{database}_engine",
            "publication.autocreate.mode": "filtered",
            "table.include.list": "public[.].*",
        }
    name = {"mariadb": "MariaDb", "mysql": "MySql"}[product]
    return found | {
        "connector.class": f"io.debezium.connector.{product}.{name}Connector",
        "database.include.list": database,
        "database.server.id": "184055",
        "database.ssl.mode": {"mariadb": "disable", "mysql": "preferred"}[product],
        "driver.allowPublicKeyRetrieval": "true",
        "schema.history.internal": "io.debezium.relational.history.MemorySchemaHistory",
        "schema.history.internal.store.only.captured.databases.ddl": "true",
        "schema.history.internal.store.only.captured.tables.ddl": "true",
    }


def _records_in(output: Path) -> list[EngineRecord]:
    """The records of every line that the engine has completed."""
    lines = output.read_text().split("\n")[:-1]
    return [
        EngineRecord(
            line["topic"],
            json.loads(line["key"] or "null"),
            json.loads(line["value"] or "null"),
            line["headers"],
        )
        for line in map(json.loads, lines)
    ]


def _is_marker(record: EngineRecord, number: int | None) -> bool:
    """Whether a record is the row of ``marker`` with that number, or any row of it."""
    if not record.topic.endswith(".marker") or record.value is None:
        return False
    return number is None or record.value["payload"]["after"]["id"] == number


@contextlib.contextmanager
def started_engine(
    folder: Path, product: str, url: str, database: str, execute: Callable[[str], object]
) -> Iterator[Callable[[], list[EngineRecord]]]:
    """The engine over the tables of a database, which has a table ``marker (id)``.

    It captures when the block begins.  The function that the block gets returns the records of
    what was committed until it was called, in order, without those of ``marker``.
    """
    jars = jars_or_skip("debezium")
    if shutil.which("javac") is None:
        pytest.skip("there is no javac")
    given, output, log = folder / "engine.properties", folder / "records", folder / "engine.log"
    properties = _properties(product, url, database)
    given.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    output.touch()
    program = (str(_PROGRAM), str(given), str(output))
    with log.open("w") as errors:
        process = subprocess.Popen(
            ["java", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-cp", f"{jars}/*", *program],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
        )
    deadline_s = time.monotonic() + 90 * PATIENCE

    def wait_for_marker(number: int | None, each: Callable[[], object] = lambda: None) -> None:
        while not any(_is_marker(record, number) for record in _records_in(output)):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline_s, log.read_text()[-3000:]
            each()
            time.sleep(0.05)

    def records() -> list[EngineRecord]:
        execute(f"INSERT INTO marker VALUES ({_LAST})")
        wait_for_marker(_LAST)
        return [one for one in _records_in(output) if not one.topic.endswith(".marker")]

    numbers = iter(range(1, _LAST))
    try:
        wait_for_marker(None, lambda: execute(f"INSERT INTO marker VALUES ({next(numbers)})"))
        yield records
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20 * PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
