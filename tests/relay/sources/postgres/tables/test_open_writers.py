"""Dumps of suspended tables wait for the transactions that had written to them, each once."""

from __future__ import annotations

from typing import Any, cast

import pytest

from databus.common.errors import UnsupportedChange
from databus.relay.sources.postgres.tables import open_writers
from databus.relay.sources.postgres.tables.open_writers import OpenWriters
from databus.relay.sources.postgres.tables.postgres_tables import PostgresTable

SOURCES = [f"public.t{number}" for number in range(5)]


class Catalogue:
    """Open transactions: what each query of a table's writers finds, the last of them forever."""

    def __init__(self, *found: set[str]) -> None:
        self.found = list(found)
        self.query_count = 0

    async def writers(self, table: PostgresTable) -> set[str]:
        self.query_count += 1
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]

    async def named(self, transactions: set[str]) -> str:
        return ", ".join(f"process {name}" for name in sorted(transactions))


class Table:
    def __init__(self, source: str) -> None:
        self.source = source


def table(source: str) -> PostgresTable:
    return cast("PostgresTable", Table(source))


def over(*found: set[str]) -> tuple[OpenWriters, Catalogue]:
    catalogue = Catalogue(*found)
    return OpenWriters(cast("Any", catalogue)), catalogue


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_writers, "WAIT_S", 0.05)
    monkeypatch.setattr(open_writers, "_EVERY_S", 0.001)


async def test_a_transaction_that_has_written_to_many_tables_is_waited_for_once() -> None:
    writers, catalogue = over({"forgotten"})
    for number, source in enumerate(SOURCES):
        before = catalogue.query_count
        with pytest.raises(UnsupportedChange, match="process forgotten") as raised:
            await writers.wait(table(source))
        assert raised.value.message.startswith(f"{source} waits for transactions")
        if number:
            assert catalogue.query_count == before + 2, "it did not wait again"


async def test_transactions_that_begin_later_are_not_waited_for() -> None:
    writers, catalogue = over({"1"}, {"1"}, {"1", "2"}, {"2", "3"}, {"4"})
    await writers.wait(table("public.t"))
    assert catalogue.found == [{"4"}]


async def test_a_wait_that_failed_is_for_the_same_transactions_when_it_is_repeated() -> None:
    writers, catalogue = over({"1"})
    with pytest.raises(UnsupportedChange):
        await writers.wait(table("public.t"))
    catalogue.found = [{"2"}]
    await writers.wait(table("public.t"))
    await writers.wait(table("public.t"))


async def test_after_another_suspension_the_writers_are_others() -> None:
    writers, catalogue = over({"1"}, set())
    await writers.wait(table("public.t"))
    catalogue.found = [{"2"}]
    writers.forget("public.t")
    with pytest.raises(UnsupportedChange, match="process 2"):
        await writers.wait(table("public.t"))
