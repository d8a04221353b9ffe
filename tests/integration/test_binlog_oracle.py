"""Our decoders and python-mysql-replication read the same rows out of the same binlog."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql.tables.mapped_table import MappedTable
from tests.support.binlog_oracle import (
    LAST,
    NO_DATE,
    REFUSED,
    Change,
    Row,
    changes_read_by_the_other,
    comparable,
    is_doubtful,
    is_misread,
    position_of,
)
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import Streamed, mariadb_config, opened, read_to_end
from tests.support.mysql_types import MYSQL_TYPES, TYPES, Types, is_in_the_kernel, value_rows
from tests.support.random_values import random_literal, random_no_date

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated, use:DeprecationWarning")

SEEDS = range(1, 1 + int(os.environ.get("DATABUS_ORACLE_SEEDS", "1")))
"""What the random values follow from; after a change of a decoder, run more of them."""

State = dict[tuple[str, int], Row]


class Tables:
    """Tables whose columns have all the types, with rows that are written at random.

    Owner: one test. After each transaction all rows are read from the server: ``states``.
    """

    def __init__(
        self, database: FreshDatabase, rng: random.Random, *, zeros: float = 0.0, **known: Types
    ) -> None:
        self._known = known
        self.columns = {
            name: {f"{name[0]}{number}": column_type for number, (column_type, _) in enumerate(of)}
            for name, of in known.items()
        }
        self.types = {n: type_ for of in self.columns.values() for n, type_ in of.items()}
        self.states: list[State] = []
        self._rng = rng
        self._zeros = zeros
        self._ids: dict[str, list[int]] = {name: [] for name in known}
        self._connection = database.server.connect(database.name)
        self._cursor = self._connection.cursor()
        self._cursor.execute("SET time_zone = '+00:00', sql_mode = ''")
        for name, columns in self.columns.items():
            declared = ", ".join(f"{column} {type_}" for column, type_ in columns.items())
            self._cursor.execute(f"CREATE TABLE {name} (id INT PRIMARY KEY, {declared})")
        self._cursor.execute(f"CREATE TABLE {LAST} (id INT PRIMARY KEY)")

    def write(self) -> None:
        """Known values, then transactions at random, and the last row."""
        with contextlib.closing(self._connection):
            with self._transaction():
                self._insert_known_values()
            for _ in range(8):
                with self._transaction():
                    for name in self.columns:
                        self._insert_random_values(name, 15)
                        self._update(name)
                        self._delete(name)
            self._cursor.execute(f"INSERT INTO {LAST} VALUES (1)")
            self._connection.commit()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._cursor.execute("BEGIN")
        yield
        self._connection.commit()
        state: State = {}
        for name, columns in self.columns.items():
            doubtful = {column: type_ for column, type_ in columns.items() if is_doubtful(type_)}
            wanted = [
                f"CAST({column} AS BINARY)" if type_.startswith("vector") else column
                for column, type_ in doubtful.items()
            ]
            self._cursor.execute(f"SELECT {', '.join(['id', *wanted])} FROM {name}")
            for number, *values in self._cursor.fetchall():
                state[name, number] = dict(zip(doubtful, values, strict=True))
        self._connection.commit()
        self.states.append(state)

    def _insert_known_values(self) -> None:
        """A row of nulls, then the values at the edges of the types."""
        for name, types in self._known.items():
            for row in value_rows(types):
                self._insert(name, [[literal for literal, _ in row]])

    def _insert_random_values(self, name: str, count: int) -> None:
        self._insert(
            name, [[self._value(type_) for type_ in self._declared(name)] for _ in range(count)]
        )

    def _update(self, name: str) -> None:
        """One row in some columns, a third of the rows in one, and one row in its key."""
        columns = self._rng.sample(
            sorted(self.columns[name].items()), min(3, len(self.columns[name]))
        )
        changes = [f"{column} = {self._value(type_)}" for column, type_ in columns]
        ids = self._ids[name]
        one, other = self._rng.sample(ids, 2)
        self._cursor.execute(f"UPDATE {name} SET {', '.join(changes)} WHERE id = {one}")
        self._cursor.execute(f"UPDATE {name} SET {changes[0]} WHERE id % 3 = {one % 3}")
        self._cursor.execute(f"UPDATE {name} SET id = {max(ids) + 1} WHERE id = {other}")
        ids[ids.index(other)] = max(ids) + 1

    def _delete(self, name: str) -> None:
        """Some of the rows."""
        gone = self._rng.sample(self._ids[name], 4)
        self._cursor.execute(f"DELETE FROM {name} WHERE id IN ({', '.join(map(str, gone))})")
        self._ids[name] = [number for number in self._ids[name] if number not in gone]

    def _declared(self, name: str) -> list[str]:
        return list(self.columns[name].values())

    def _value(self, column_type: str) -> str:
        if self._rng.random() < 0.1:
            return "NULL"
        if self._rng.random() < self._zeros:
            return random_no_date(self._rng, column_type)
        return random_literal(self._rng, column_type)

    def _insert(self, name: str, rows: list[list[str]]) -> None:
        first = max(self._ids[name], default=0) + 1
        ids = range(first, first + len(rows))
        values = [
            f"({', '.join([str(number), *row])})" for number, row in zip(ids, rows, strict=True)
        ]
        self._cursor.execute(f"INSERT INTO {name} VALUES {', '.join(values)}")
        self._ids[name] += ids


def changes_of(streamed: Streamed) -> list[tuple[int, Change]]:
    """What we have read, with the commit clock of each change."""
    found = []
    for event in streamed.events():
        table = event.source.partition(".")[2]
        if table != LAST:
            found.append((event.scn, (table, event.before, event.after)))
    return found


def assert_read_alike(
    ours: list[Change], theirs: list[Change], tables: Tables, zero_dates: str
) -> None:
    """Every value of every image, but those that the library is known to misread."""
    assert [_outline(change) for change in ours] == [_outline(change) for change in theirs]
    differing, compared = [], set()
    for (table, *our_images), (_, *their_images) in zip(ours, theirs, strict=True):
        for image, other in zip(our_images, their_images, strict=True):
            for column, value in (image or {}).items():
                type_, read = tables.types.get(column, "int"), (other or {})[column]
                if is_misread(type_, value):
                    continue
                compared.add(column)
                if read is NO_DATE and zero_dates == "null":
                    read = None
                if comparable(type_, value, read) != read:
                    differing.append(f"{table}.{column} {type_}: {value!r}, but {read!r}")
    assert not differing, "\n".join(differing[:9])
    assert compared >= {name for name in tables.types if not name.startswith("r")}


def _outline(change: Change) -> tuple[str, Any, Any]:
    table, before, after = change
    return table, before and list(before), after and list(after)


def assert_as_the_server_says(
    ours: list[tuple[int, Change]], tables: Tables, zero_dates: str
) -> int:
    """Before images are what was; what the library misreads is after each commit as selected.

    Returns how many values were read from the server.
    """
    state: State = {}
    read_count = 0
    scns = sorted({scn for scn, _ in ours})
    for scn, selected in zip(scns, tables.states, strict=True):
        for _, (table, before, after) in (one for one in ours if one[0] == scn):
            if before is not None:
                assert state.pop((table, before["id"])) == before
            if after is not None:
                state[table, after["id"]] = after
        assert state.keys() == selected.keys()
        for (table, number), row in state.items():
            for column, value in row.items():
                if is_misread(tables.types.get(column, "int"), value):
                    expected = selected[table, number][column]
                    if str(expected).startswith("0000") and zero_dates == "null":
                        expected = None
                    assert value == expected, f"{table}.{column}"
                    read_count += 1
    return read_count


async def changes_both_ways(source: MySqlSource, start: int) -> list[tuple[int, Change]]:
    """What the kernel reads after an SCN; the Python decoder reads the same bytes."""
    by_hand = MappedTable.rows

    def rows(self: MappedTable, *arguments: Any, **options: Any) -> Any:
        assert not self.schema.source.endswith((".kernel", ".dates")), "the kernel reads them all"
        return by_hand(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedTable, "rows", rows)
        streamed = await read_to_end(source, start)
    source.use_kernels = False
    assert bytes((await read_to_end(source, start)).data) == bytes(streamed.data)
    return changes_of(streamed)


@contextlib.asynccontextmanager
async def reading(
    database: FreshDatabase, zero_dates: str
) -> AsyncIterator[tuple[MySqlSource, int]]:
    """A source that is open before the tables are written, and where it starts.

    The history of the server has statements of other tests, which may have changed any table.
    """
    options: dict[str, Any] = {"zero_dates": zero_dates}
    async with opened(
        mariadb_config(database.url, f"{database.name}.*", options=options)
    ) as source:
        yield source, await source.first_scn()


@pytest.mark.parametrize("seed", SEEDS)
async def test_all_types_are_read_as_the_other_decoder_reads_them(
    database: FreshDatabase, seed: int
) -> None:
    server = database.url.partition(":")[0]
    known = MYSQL_TYPES if server == "mysql" else TYPES
    refused = [one for one in known if one[0] in REFUSED]
    kernel = [one for one in known if is_in_the_kernel(server, one[0]) and one not in refused]
    plain = [one for one in known if one not in refused and one not in kernel]
    tables = Tables(database, random.Random(seed), kernel=kernel, plain=plain, refused=refused)
    position = position_of(database)
    async with reading(database, "error") as (source, start):
        tables.write()
        ours = await changes_both_ways(source, start)
    assert assert_as_the_server_says(ours, tables, "error") > 100
    theirs = changes_read_by_the_other(database, position, tables.types, without=("refused",))
    read_alike = [change for _, change in ours if change[0] != "refused"]
    assert_read_alike(read_alike, theirs, tables, "error")


@pytest.mark.parametrize("seed", SEEDS)
async def test_dates_with_zeros_are_where_the_other_decoder_has_none(
    database: FreshDatabase, seed: int
) -> None:
    dates: Types = [
        (column_type, [("'0000-00-00'", None)])
        for column_type in ("date", "datetime", "datetime(1)", "datetime(6)")
    ] + [(column_type, [("0", None)]) for column_type in ("timestamp null", "timestamp(3) null")]
    tables = Tables(database, random.Random(seed), dates=dates, zeros=0.3)
    position = position_of(database)
    async with reading(database, "null") as null, reading(database, "text") as text:
        tables.write()
        read = {"null": await changes_both_ways(*null), "text": await changes_both_ways(*text)}
    theirs = changes_read_by_the_other(database, position, tables.types)
    for zero_dates, ours in read.items():
        assert assert_as_the_server_says(ours, tables, zero_dates) > 50
        assert_read_alike([change for _, change in ours], theirs, tables, zero_dates)
