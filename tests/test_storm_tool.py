"""The storm's own parts: spelling, shrinking, comparing."""

from __future__ import annotations

import random
from pathlib import Path

from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.storm import script
from tests.storm.kinds import kind_of
from tests.storm.replica import Held, Replica, Table, alike, differences
from tests.storm.script import Step
from tests.storm.servers import number
from tests.storm.shrinking import shrunk
from tests.storm.spelling import Dialect, Modes, respell


def test_a_statement_is_spelt_in_many_ways_and_equally_for_equal_seeds() -> None:
    sql = "TRUNCATE TABLE `a``b`"
    spelt = {respell(random.Random(seed), sql, Dialect(), Modes()) for seed in range(300)}
    assert len(spelt) > 50
    assert {"TRUNCATE TABLE `a``b`", "truncate table`a``b`"} & spelt
    assert any(one.startswith("/*!") for one in spelt)
    assert all("`a``b`" in one for one in spelt)
    again = {respell(random.Random(seed), sql, Dialect(), Modes()) for seed in range(300)}
    assert again == spelt
    quoted = respell(random.Random(1), "DROP TABLE `t1`", Dialect(), Modes(ansi_quotes=True))
    assert "`" not in quoted


def test_literals_keep_their_text_however_a_statement_is_spelt() -> None:
    literal = r"'it\'s  TRUNCATE `t1` -- x'"
    for seed in range(100):
        found = respell(
            random.Random(seed), f"INSERT INTO `t1` VALUES ({literal})", Dialect(), Modes()
        )
        assert literal in found


def test_a_failing_script_is_shrunk_to_the_steps_that_matter() -> None:
    steps = [Step(0, str(number), "p") for number in range(100)]
    found = shrunk(steps, lambda s: {"17", "63", "64"} <= {step.sql for step in s}, 10)
    assert [step.sql for step in found] == ["17", "63", "64"]


def test_a_script_is_read_as_it_was_written(tmp_path: Path) -> None:
    steps = [Step(1, "SELECT 'ü'", "p"), script.check()]
    script.written(steps, tmp_path / "keep" / "one.jsonl")
    assert script.read(tmp_path / "keep" / "one.jsonl") == steps


def test_a_difference_is_found_in_rows_keys_and_values() -> None:
    table = Table(None, 0, {(1,): Held({"id": 1, "a": "x"}, 0), (3,): Held({"id": 3, "a": "z"}, 0)})
    rows = [{"id": 1, "a": "y"}, {"id": 2, "a": "x"}]
    found = differences(["id", "a"], ["id"], rows, table)
    assert [line.split()[0] for line in found] == ["row"] * 3
    assert "a = 'x', not 'y'" in found[0] and "missing" in found[1] and "no more" in found[2]
    rows = [{"id": 1, "a": "x"}, {"id": 3, "a": "z"}]
    assert differences(["id", "a"], ["id"], rows, table) == []
    table.rows[(1,)].values.pop("a")
    assert "a = None, not 'x'" in differences(["id", "a"], ["id"], rows, table)[0]
    assert alike(1, True) and alike('{"a": 1}', '{"a":1}')
    assert not alike("1", 1) and not alike(None, 0)


def test_a_statement_counts_as_its_kind_however_it_is_spelt() -> None:
    assert kind_of("/*!40000 Truncate/**/TABLE `x` */") == "TRUNCATE"
    assert kind_of("-- it's `so`\nalter table t1 /* ADD */ drop column b") == "ALTER TABLE DROP"
    assert kind_of("CREATE OR REPLACE TABLE `order` SELECT 1") == "CREATE TABLE SELECT"
    assert kind_of("XA PREPARE 'x1'") == "XA PREPARE"
    assert kind_of("SET binlog_format = ROW") == "SET BINLOG_FORMAT"


def test_versions_are_compared_as_numbers() -> None:
    assert number("10.11.19-MariaDB-log") == (10, 11, 19)
    assert number("8.0.15") < (8, 0, 20) < number("9.7.4-2")
    assert number("18.0 (Debian)") >= (18,)


def test_a_deletion_of_a_row_that_is_not_there_is_a_fault_unless_a_dump_repairs() -> None:
    schema = SourceSchema("main.t", (Column("id", Kind.INT, False),), ("id",))
    replica = Replica(lambda _: schema)
    key = {number: schema.encode_key([number]) for number in (1, 2)}

    def deleted(scn: int, seq: int, *numbers: int, dump: bool) -> bytes:
        window = WindowBuilder(scn, 0, seq)
        for one in numbers:
            window.event(Op.DELETE, schema.source_id, schema.fingerprint, key[one])
        return window.end(dump=dump)

    window = WindowBuilder(5, 0)
    row = schema.encode_row([1])
    window.event(Op.INSERT, schema.source_id, schema.fingerprint, key[1], after=row)
    replica.apply(window.end())
    replica.apply(deleted(5, 2, 2, dump=True))
    assert replica.faults == {}
    replica.apply(deleted(6, 0, 1, 2, dump=False))
    assert list(replica.faults) == ["main.t"] and len(replica.faults["main.t"]) == 1
    assert "DELETE of (2,) at scn 6" in replica.faults["main.t"][0]
    assert [line.split(": ")[1] for line in replica.history["main.t"]] == [
        "INSERT (1,)", "DELETE (2,)", "DELETE (1,)", "DELETE (2,)",
    ]  # fmt: skip
