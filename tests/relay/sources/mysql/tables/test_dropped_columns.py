"""Which columns a statement drops, and how long that is remembered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.sources.mysql.gtid.mysql_lineage import MySqlResumeState, decode_resume_state
from databus.relay.sources.mysql.statements import Effects, Statement, StatementDialect, effects_of
from databus.relay.sources.mysql.tables.changed_tables import UnseenChange, changed_unseen
from databus.relay.sources.mysql.tables.dropped_columns import DroppedColumns

T = ("shop", "t")
DROPS = [
    ("DROP c", ["c"]),
    ("DROP COLUMN `c` RESTRICT, DROP d", ["c", "d"]),
    ("DROP COLUMN IF EXISTS c", ["c"]),
    ("DROP `index`, DROP COLUMN period", ["index", "period"]),
    ("RENAME COLUMN c TO d", ["c"]),
    ("CHANGE COLUMN c d INT", ["c"]),
    ("DROP INDEX c, DROP KEY IF EXISTS d, DROP PRIMARY KEY", []),
    ("DROP FOREIGN KEY c, DROP CONSTRAINT d, DROP CHECK e", []),
    ("DROP PARTITION c", []),
    ("DROP PERIOD FOR SYSTEM_TIME", []),
    ("CHANGE c c BIGINT, MODIFY d BIGINT, ADD e INT, RENAME INDEX f TO g", []),
]


def table(*columns: str) -> SourceSchema:
    found = tuple(Column(name, Kind.INT, nullable=name != "id") for name in columns)
    return SourceSchema("shop.t", found, ("id",))


class Stream:
    """Statements that come by, and what was certain behind each."""

    def __init__(self, *columns: str) -> None:
        self._told: SourceSchema | None = table(*columns)
        self.dropped = DroppedColumns()

    def forget_definition(self) -> None:
        self._told = None

    def alter(self, text: str, behind: Sequence[str] | None) -> list[UnseenChange]:
        found = effects_of(Statement("shop", f"ALTER TABLE t {text}"), StatementDialect(), [T])
        return self._pass(found, table(*behind) if behind is not None else None)

    def truncate(self) -> None:
        assert not self._pass(
            effects_of(Statement("shop", "TRUNCATE t"), StatementDialect(), [T]), None
        )

    def _pass(self, found: Effects, new: SourceSchema | None) -> list[UnseenChange]:
        before = {"shop.t": self._told} if self._told else {}
        keys = {source: schema.key for source, schema in before.items()}
        left = {"shop.t": new} if new else {}
        changes = list(changed_unseen(found, [T], before, keys, left, self.dropped))
        self._told = new or self._told
        return changes


@pytest.mark.parametrize(("text", "columns"), DROPS)
def test_a_statement_names_the_columns_that_it_drops(text: str, columns: list[str]) -> None:
    found = effects_of(Statement("shop", f"ALTER TABLE t {text}"), StatementDialect(), [T])
    assert found.dropped == {T: columns}
    folding = StatementDialect(folds_names=True)
    folded = effects_of(Statement("shop", f"ALTER TABLE T {text}"), folding, [("shop", "T")])
    assert folded.dropped == {("shop", "T"): columns}


def test_a_column_that_is_there_again_when_a_definition_is_certain_suspends_its_table() -> None:
    stream = Stream("id", "c")
    assert not stream.alter("DROP C", None)
    assert not stream.alter("ADD d INT", None)
    assert stream.dropped.names == {"shop.t": ("c",)}
    (change,) = stream.alter("ADD c INT", ("id", "d", "c"))
    assert change.rows_remain and "has the column c again" in change.why
    assert stream.dropped.names == {}
    assert not stream.alter("ADD e INT", ("id", "d", "c", "e")), "it is noticed once"


def test_a_dropped_column_that_stays_away_suspends_nothing() -> None:
    stream = Stream("id", "c")
    assert not stream.alter("DROP c", ("id",))
    assert stream.dropped.added_count == 0, "nothing needs to be stored"
    stream = Stream("id", "c")
    assert not stream.alter("DROP c", None)
    assert not stream.alter("ADD d INT", ("id", "d"))
    assert stream.dropped.names == {}


def test_a_column_that_consumers_never_had_does_not_return() -> None:
    stream = Stream("id")
    assert not stream.alter("DROP COLUMN IF EXISTS c", None)
    assert not stream.alter("ADD c INT", ("id", "c"))


def test_without_the_definition_of_before_every_dropped_column_counts() -> None:
    stream = Stream("id", "c")
    stream.forget_definition()
    assert not stream.alter("DROP c", None)
    assert stream.alter("ADD c INT", ("id", "c"))


def test_an_emptied_table_has_no_old_values() -> None:
    stream = Stream("id", "c")
    assert not stream.alter("DROP c", None)
    stream.truncate()
    assert not stream.alter("ADD c INT", ("id", "c"))


@pytest.mark.parametrize(
    "texts", [("DROP PRIMARY KEY, DROP id, ADD id SERIAL",), ("DROP id", "ADD id SERIAL")]
)
def test_a_recreated_key_gives_rows_other_keys(texts: Sequence[str]) -> None:
    stream = Stream("id", "c")
    for text in texts[:-1]:
        assert not stream.alter(text, None)
    (change,) = stream.alter(texts[-1], ("c", "id"))
    assert not change.rows_remain


def test_the_resume_state_has_the_dropped_columns() -> None:
    stream = Stream("id", "c")
    stream.alter("DROP c", None)
    assert stream.dropped.added_count == 1
    stored = decode_resume_state(MySqlResumeState(9, dropped=stream.dropped.names).encode())
    again = DroppedColumns(stored.dropped)
    assert again.names == {"shop.t": ("c",)}
    assert again.pass_statement("shop.t", (), None, table("id", "c")) == ["c"]
    assert decode_resume_state('{"scn": 9, "mark": null, "prepared": null}').dropped == {}
