"""``databus schema check``: what it reports, and its exit code."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from databus.common.frame.frame_format import Op
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.cli.conftest import RunCommand
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.schema_registry_server import SchemaRegistryServer, registry

__all__ = ["registry"]

TABLE = SourceSchema(
    "shop.orders",
    (
        Column("id", Kind.INT, nullable=False, type_name="int"),
        Column("state", Kind.STRING, type_name="varchar(20)"),
        Column("amount", Kind.DECIMAL, True, 10, 2, "decimal(10,2)"),
        Column("note", Kind.STRING, nullable=False, type_name="text"),
    ),
    ("id",),
)
SINK = """
[sink]
name = "search"
database = "shop"
{extra}
[[sink.route]]
source = "shop.orders"
columns = ["state", "note"]
where = "state = 'paid' AND amount > 10"
"""
FILES = SINK.format(extra='[sink.files]\nurl = "changes"\n')


class Gate:
    """A migration against saved schemas."""

    def __init__(self, databus: RunCommand, folder: Path) -> None:
        self._databus, self._folder = databus, folder
        self.clock = "mariadb:shop:0"

    def run(self, migration: str, *options: str | Path) -> tuple[int, list[dict[str, Any]]]:
        saved = self._folder / "schemas.json"
        document = {
            "database": "shop", "clock": self.clock, "schemas": [{"schema": TABLE.to_json()}],
        }  # fmt: skip
        saved.write_text(json.dumps(document))
        file = self._folder / "m.sql"
        file.write_text(migration)
        done = self._databus("schema", "check", file, "--schemas", saved, "--json", *options)
        assert done.out, done.err
        statements: list[dict[str, Any]] = json.loads(done.out)["statements"]
        return done.code, statements

    def kinds(self, migration: str, *options: str | Path) -> dict[str, str]:
        """The breaks, by kind."""
        code, statements = self.run(migration, *options)
        found = {
            one["kind"]: one["why"]
            for statement in statements
            for one in statement["findings"]
            if one["is_break"]
        }
        assert code == (5 if found else 0)
        return found

    def sink(self, text: str) -> tuple[str, Path]:
        path = self._folder / "sink.toml"
        path.write_text(text)
        return "--sink", path


@pytest.fixture
def gate(databus: RunCommand, tmp_path: Path) -> Gate:
    return Gate(databus, tmp_path)


def test_a_change_that_breaks_nothing_ends_with_0(gate: Gate) -> None:
    code, (one,) = gate.run("ALTER TABLE orders ADD paid_at DATETIME;")
    assert code == 0
    assert one["tables"][0]["reaction"] == "followed"
    assert one["tables"][0]["changes"] == ["adds paid_at datetime"]
    assert not one["tables"][0]["forward"]
    assert not one["findings"]


def test_a_dropped_column_breaks_readers_of_the_version_of_today(gate: Gate) -> None:
    found = gate.kinds("ALTER TABLE shop.orders DROP note")
    assert found.keys() == {"columns", "resolution"}
    assert "note is missing and has no default" in found["resolution"]
    allowed = ("--allow", "columns", "--allow", "resolution")
    assert not gate.kinds("ALTER TABLE shop.orders DROP note", *allowed)


def test_a_statement_that_is_not_understood_is_a_break(gate: Gate) -> None:
    for text in ("CALL migrate()", "ALTER TABLE orders ADD x WEIRD", "FROB x", "SELECT 'a"):
        found = gate.kinds(text)
        assert found.keys() & {"unknown", "suspended"}, text
    assert "not certain" in gate.kinds("ALTER TABLE orders ADD x WEIRD")["unknown"]
    gate.clock = "postgresql:1:1"
    for text in ("DO $$ BEGIN DROP TABLE x; END $$", "CALL p()", "ALTER TABLE shop.orders FROB"):
        assert gate.kinds(text).keys() == {"unknown"}, text


def test_a_statement_behind_one_that_is_not_certain_is_not_certain(gate: Gate) -> None:
    _, (_, second) = gate.run("ALTER TABLE orders ADD x WEIRD; ALTER TABLE orders ADD y INT")
    assert "earlier statement" in second["findings"][0]["why"]


def test_each_statement_sees_the_definition_after_the_one_before(gate: Gate) -> None:
    _, (first, second) = gate.run(
        "ALTER TABLE orders ADD a INT; ALTER TABLE orders MODIFY a BIGINT, RENAME TO orders2"
    )
    assert first["tables"][0]["changes"] == ["adds a int"]
    new = next(one for one in second["tables"] if one["source"] == "shop.orders2")
    assert new["reaction"] == "suspended"
    assert {"a": "bigint"}.items() <= {
        c["name"]: c["type"] for c in new["schema"]["columns"]
    }.items()


def test_a_column_that_comes_again_suspends_the_table(gate: Gate) -> None:
    found = gate.kinds("ALTER TABLE orders DROP note; ALTER TABLE orders ADD note TEXT")
    assert "note again" in found["suspended"]


def test_routes_of_sinks_that_do_not_fit_are_named(gate: Gate) -> None:
    sink = gate.sink(FILES)
    assert "sink" not in gate.kinds("ALTER TABLE orders ADD a INT", *sink)
    assert "note is gone" in gate.kinds("ALTER TABLE orders DROP note", *sink)["sink"]
    assert "reads amount" in gate.kinds("ALTER TABLE orders DROP amount", *sink)["sink"]
    found = gate.kinds("ALTER TABLE orders MODIFY amount BLOB", *sink)
    assert "stops the sink" in found["sink"]
    found = gate.kinds("ALTER TABLE orders DROP PRIMARY KEY, ADD PRIMARY KEY (note)", *sink)
    assert "its key was (id) and is (note)" in found["sink"]
    assert "is deleted" not in gate.kinds("TRUNCATE orders", *sink)
    assert "no source has this name" in gate.kinds("DROP TABLE orders", *sink)["sink"]


def test_a_sink_of_another_database_is_left_out(gate: Gate) -> None:
    sink = gate.sink(FILES.replace('"shop"', '"other"'))
    assert "sink" not in gate.kinds("ALTER TABLE orders DROP note", *sink)


def test_a_mirror_drops_what_the_source_drops(gate: Gate) -> None:
    text = '[sink]\nname = "m"\ndatabase = "shop"\n[sink.sql]\nurl = "sqlite:///m.db"\n'
    found = gate.kinds("ALTER TABLE orders DROP amount", *gate.sink(text))
    assert found["sink"] == "the mirror drops its column amount"


def registered_sink(registry: SchemaRegistryServer, form: str) -> str:
    return (
        SINK.format(
            extra=f'[sink.kafka]\nservers = "127.0.0.1:1"\nenvelope = "flat"\nformat = "{form}"\n'
            f'registry = "{registry.url}"\n'
        )
        .replace('columns = ["state", "note"]\n', "")
        .replace("where", "# where")
    )


def test_a_registry_compares_protobuf_by_the_numbers_of_the_newest_version(
    gate: Gate, registry: SchemaRegistryServer
) -> None:
    sink = gate.sink(registered_sink(registry, "protobuf"))
    registry.add("shop.shop.orders-value", "message Flat {\n  int64 a = 7;\n  string state = 1;\n}")
    found = gate.kinds("ALTER TABLE orders ADD b INT NOT NULL AFTER id", *sink)
    assert "registry" not in found
    found = gate.kinds("ALTER TABLE orders ADD a INT NOT NULL AFTER id", *sink)
    assert "('Flat', 7) was int64 and is int32" in found["registry"]


def test_the_registry_is_asked_whether_it_takes_the_new_schema(
    gate: Gate, registry: SchemaRegistryServer
) -> None:
    text = registered_sink(registry, "avro")
    sink = gate.sink(text)
    alter = "ALTER TABLE orders ADD a INT NOT NULL AFTER id"
    assert "registry" not in gate.kinds(alter, *sink)  # No version is registered yet.
    registry.add(
        "shop.shop.orders-value",
        {"type": "record", "name": "Flat", "fields": [{"name": "id", "type": "int"}]},
    )
    assert "the field a has no default" in gate.kinds(alter, *sink)["registry"]
    dead = gate.sink(text.replace(registry.url, "http://127.0.0.1:1"))
    assert "could not be compared" in gate.kinds("ALTER TABLE orders ADD b INT", *dead)["unknown"]


def test_a_class_of_a_consumer_is_tried_on_the_new_rows(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gate_rows.py").write_text(
        "from dataclasses import dataclass\n\n\n"
        "@dataclass\nclass Order:\n    id: int\n    note: str\n"
    )
    model = ("--model", "shop.orders=gate_rows:Order")
    assert "consumer" not in gate.kinds("ALTER TABLE orders DROP state", *model)
    assert "note" in gate.kinds("ALTER TABLE orders DROP note", *model)["consumer"]
    assert "note" in gate.kinds("ALTER TABLE orders MODIFY note TEXT NULL", *model)["consumer"]
    sys.modules.pop("gate_rows")


def test_columns_that_rules_leave_out_are_not_missed(gate: Gate, tmp_path: Path) -> None:
    config = tmp_path / "databus.toml"
    config.write_text(
        '[relay]\n[[database]]\nname = "shop"\nurl = "mariadb://u@h/shop"\nsources = ["shop.*"]\n'
        'exclude_columns = ["*.secret"]\nmask_columns = { "*.pin" = 4 }\n'
    )
    code, (one,) = gate.run("ALTER TABLE orders ADD secret TEXT, ADD pin TEXT", "-c", config)
    assert code == 0
    assert one["tables"][0]["changes"] == ["adds pin masked"]
    found = gate.kinds(
        "ALTER TABLE orders ADD pin INT FIRST, DROP PRIMARY KEY, ADD PRIMARY KEY (pin)",
        "-c", config,
    )  # fmt: skip
    assert "can only be" in found["suspended"]
    code, found_other = gate.run("CREATE TABLE other.t (a INT)", "-c", config)
    assert (code, found_other[0]["tables"]) == (0, [])


def test_wrong_options_end_with_2(databus: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "m.sql").write_text("SELECT 1")
    (tmp_path / "bad.json").write_text("{}")
    bad = databus("schema", "check", tmp_path / "m.sql", "--schemas", tmp_path / "bad.json")
    assert bad.code == 2
    assert "databus schema save" in bad.err
    other = databus("schema", "check", tmp_path / "m.sql", "--allow", "all")
    assert other.code == 2
    assert "--allow 'all' is not one of suspended" in other.err


async def run_schema(*words: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("databus"), "schema", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.processes
async def test_a_live_relay_gives_the_schemas_and_the_readers(tmp_path: Path) -> None:
    live = LiveRelay(tmp_path, clock="mariadb:shop:0")
    live.append(window(1, [(Op.INSERT, ORDERS, 1)]))
    migration, saved = tmp_path / "m.sql", tmp_path / "s.json"
    migration.write_text("ALTER TABLE orders DROP COLUMN item;\nALTER TABLE other ADD x INT;\n")
    async with live.served():
        relay = ("--relay", live.url)
        (code, out, err), save = await asyncio.gather(
            run_schema("check", str(migration), *relay), run_schema("save", str(saved), *relay)
        )
    live.close()
    assert save[0] == 0, save[2]
    assert json.loads(saved.read_text())["schemas"][0]["schema"] == ORDERS.to_json()
    assert code == 5, err
    assert "m.sql:1: ALTER TABLE orders DROP COLUMN item" in out
    assert "BREAK (columns) shop.orders.item: the column is gone" in out
    assert "database shop: 2 statements, breaks: 1 columns" in out
