"""A small shop on any of the databases: its tables, a mixed workload, and the tables' rows.

The demo shows it and the end-to-end tests verify against it.  The workload contains what a stream
can get wrong: transactions over several tables, updates of keys, deletes, rollbacks to the start
and to a savepoint, nulls, unicode, binary, decimals.
"""

from __future__ import annotations

import datetime as dt
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

Rows = dict[tuple[Any, ...], dict[str, Any]]

_NAMES = ("Zoë", "Søren", "Ольга", "王小明", "Grace", "Łukasz", "Ada", "O'Brien", "İpek", "🚌 Bus")
_STATES = ("new", "paid", "packed", "sent")


@dataclass(frozen=True, slots=True)
class ShopDialect:
    """The differences between the databases: the schema's name, types and parameter marks."""

    name: str
    namespace: str
    blob: str
    moment: str
    text: str = "VARCHAR(200)"
    suffix: str = ""

    def statement(self, sql: str) -> str:
        """``sql`` with the parameter marks of the driver."""
        return sql.replace("%s", "?") if self.name == "sqlite" else sql


DIALECTS = {
    "sqlite": ShopDialect("sqlite", "main", "BLOB", "TEXT"),
    "postgres": ShopDialect("postgres", "public", "BYTEA", "TIMESTAMPTZ"),
    "mariadb": ShopDialect("mariadb", "shop", "VARBINARY(200)", "DATETIME(6)"),
}

TABLES: dict[str, tuple[str, ...]] = {
    "customers": ("id",),
    "orders": ("id",),
    "order_lines": ("order_id", "line"),
    "stock": ("sku",),
}


def create_statements(dialect: ShopDialect) -> list[str]:
    """The tables of the shop."""
    text, blob, moment = dialect.text, dialect.blob, dialect.moment
    return [
        f"CREATE TABLE customers (id BIGINT NOT NULL PRIMARY KEY, name {text} NOT NULL, "
        f"credit DECIMAL(12,2), note {text}, joined {moment})",
        f"CREATE TABLE orders (id BIGINT NOT NULL PRIMARY KEY, customer BIGINT NOT NULL, "
        f"state {text} NOT NULL, total DECIMAL(12,2) NOT NULL, placed {moment} NOT NULL)",
        f"CREATE TABLE order_lines (order_id BIGINT NOT NULL, line INT NOT NULL, sku {text}, "
        "qty INT, PRIMARY KEY (order_id, line))",
        f"CREATE TABLE stock (sku {text} NOT NULL PRIMARY KEY, on_hand INT NOT NULL, "
        f"photo {blob}, weight DOUBLE PRECISION)",
    ]


@dataclass
class Shop:
    """The shop on one connection.

    Invariants:
        I1. The same seed makes the same sequence of transactions.
        I2. ``counts`` has the number of transactions of each kind.

    Owner: one thread; ``connect`` gives it connections of its own.
    """

    dialect: ShopDialect
    connect: Callable[[], Any]
    seed: int = 1
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._next_id = 0

    def create(self, *, customers: int = 50, skus: int = 40) -> None:
        """Create the tables and their first rows."""
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            for statement in create_statements(self.dialect):
                cursor.execute(statement)
            with self._transaction(connection, cursor):
                for number in range(customers):
                    self._add_customer(cursor, number)
                for number in range(skus):
                    photo = self._random.randbytes(24) if number % 3 else None
                    self._do(
                        cursor,
                        "INSERT INTO stock VALUES (%s, %s, %s, %s)",
                        (f"SKU-{number:03d}", 1000, photo, number * 0.1),
                    )
        self._next_id = customers

    @contextmanager
    def session(self) -> Iterator[Callable[[], str]]:
        """A function that runs one transaction each time and returns its kind."""
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            self._next_id = max(self._next_id, self._largest_id(cursor) + 1)
            yield lambda: self._step(connection, cursor)

    def rows(self) -> dict[str, Rows]:
        """The present rows of the tables, from one read transaction: by source name, by key."""
        found: dict[str, Rows] = {}
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            if self.dialect.name == "postgres":
                cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            else:
                cursor.execute("BEGIN")
            for table, key in TABLES.items():
                cursor.execute(f"SELECT * FROM {table}")
                names = [column[0] for column in cursor.description]
                rows = [self._row(names, row) for row in cursor]
                found[f"{self.dialect.namespace}.{table}"] = {
                    tuple(row[name] for name in key): row for row in rows
                }
            cursor.execute("COMMIT")
        return found

    def _row(self, names: list[str], values: tuple[Any, ...]) -> dict[str, Any]:
        """A row as the stream gives it; SQLite has no decimals of its own."""
        row = dict(zip(names, values, strict=True))
        if self.dialect.name == "sqlite":
            for name in row.keys() & {"credit", "total"}:
                if row[name] is not None:
                    row[name] = Decimal(repr(row[name]))
        return row

    def _step(self, connection: Any, cursor: Any) -> str:
        kinds: list[tuple[int, Callable[[Any], None]]] = [
            (40, self._place_order),
            (25, self._advance_order),
            (8, self._join),
            (8, self._restock),
            (6, self._cancel_order),
            (5, self._rename_key),
            (4, self._abandon),
            (4, self._partly_abandon),
        ]
        weights = [weight for weight, _ in kinds]
        work = self._random.choices([work for _, work in kinds], weights)[0]
        kind = work.__name__.strip("_")
        try:
            with self._transaction(connection, cursor):
                work(cursor)
        except _Abandoned:
            kind = "rolled_back"
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return kind

    @contextmanager
    def _transaction(self, connection: Any, cursor: Any) -> Iterator[None]:
        cursor.execute("BEGIN IMMEDIATE" if self.dialect.name == "sqlite" else "BEGIN")
        try:
            yield
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")

    def _do(self, cursor: Any, sql: str, parameters: tuple[Any, ...] = ()) -> None:
        cursor.execute(self.dialect.statement(sql), self._adapted(parameters))

    def _adapted(self, parameters: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.dialect.name == "postgres":
            return parameters
        plain: list[Any] = []
        for value in parameters:
            if isinstance(value, dt.datetime):
                value = value.replace(tzinfo=None)
                plain.append(value.isoformat(" ") if self.dialect.name == "sqlite" else value)
            elif isinstance(value, Decimal) and self.dialect.name == "sqlite":
                plain.append(str(value))
            else:
                plain.append(value)
        return tuple(plain)

    def _largest_id(self, cursor: Any) -> int:
        cursor.execute(
            "SELECT max(id) FROM (SELECT id FROM customers UNION ALL SELECT id FROM orders) AS ids"
        )
        return int(cursor.fetchone()[0] or 0)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _pick(self, cursor: Any, table: str, column: str) -> Any:
        """The smallest value of ``column`` at or above a random number, or None."""
        cursor.execute(f"SELECT min({column}), max({column}) FROM {table}")
        low, high = cursor.fetchone()
        if low is None:
            return None
        self._do(
            cursor,
            f"SELECT min({column}) FROM {table} WHERE {column} >= %s",
            (self._random.randint(low, high),),
        )
        return cursor.fetchone()[0]

    def _sku(self) -> str:
        return f"SKU-{self._random.randrange(40):03d}"

    def _money(self) -> Decimal:
        return Decimal(self._random.randrange(1, 10**6)) / 100

    def _add_customer(self, cursor: Any, number: int) -> None:
        note = self._random.choice((None, "", "né à Łódź", "x" * 150))
        joined = dt.datetime(2012, 10, 14, tzinfo=dt.UTC) + dt.timedelta(
            microseconds=self._random.randrange(10**14)
        )
        credit = None if note is None else self._money()
        self._do(
            cursor,
            "INSERT INTO customers VALUES (%s, %s, %s, %s, %s)",
            (number, self._random.choice(_NAMES), credit, note, joined),
        )

    def _join(self, cursor: Any) -> None:
        self._add_customer(cursor, self._new_id())

    def _place_order(self, cursor: Any) -> None:
        order = self._new_id()
        customer = self._pick(cursor, "customers", "id")
        placed = dt.datetime.now(dt.UTC)
        self._do(
            cursor,
            "INSERT INTO orders VALUES (%s, %s, 'new', %s, %s)",
            (order, customer, self._money(), placed),
        )
        for line in range(self._random.randint(1, 4)):
            sku = self._sku()
            self._do(
                cursor,
                "INSERT INTO order_lines VALUES (%s, %s, %s, %s)",
                (order, line, sku, self._random.choice((None, 1, 2, 7))),
            )
            self._do(cursor, "UPDATE stock SET on_hand = on_hand - 1 WHERE sku = %s", (sku,))
        self._do(cursor, "UPDATE customers SET credit = credit - 1 WHERE id = %s", (customer,))

    def _advance_order(self, cursor: Any) -> None:
        order = self._pick(cursor, "orders", "id")
        state = self._random.choice(_STATES)
        self._do(cursor, "UPDATE orders SET state = %s WHERE id = %s", (state, order))
        self._do(
            cursor, "UPDATE order_lines SET qty = 9 WHERE order_id = %s AND line = 0", (order,)
        )

    def _restock(self, cursor: Any) -> None:
        self._do(
            cursor,
            "UPDATE stock SET on_hand = on_hand + 100, photo = %s, weight = weight * 1.1 "
            "WHERE sku = %s",
            (self._random.randbytes(16), self._sku()),
        )

    def _cancel_order(self, cursor: Any) -> None:
        order = self._pick(cursor, "orders", "id")
        self._do(cursor, "DELETE FROM order_lines WHERE order_id = %s", (order,))
        self._do(cursor, "DELETE FROM orders WHERE id = %s", (order,))

    def _rename_key(self, cursor: Any) -> None:
        order, new = self._pick(cursor, "orders", "id"), self._new_id()
        self._do(cursor, "UPDATE order_lines SET order_id = %s WHERE order_id = %s", (new, order))
        self._do(cursor, "UPDATE orders SET id = %s WHERE id = %s", (new, order))

    def _abandon(self, cursor: Any) -> None:
        self._place_order(cursor)
        self._cancel_order(cursor)
        raise _Abandoned

    def _partly_abandon(self, cursor: Any) -> None:
        self._place_order(cursor)
        cursor.execute("SAVEPOINT regret")
        self._cancel_order(cursor)
        self._rename_key(cursor)
        cursor.execute("ROLLBACK TO SAVEPOINT regret")
        self._restock(cursor)


class _Abandoned(Exception):
    """The transaction is rolled back on purpose."""


@dataclass(frozen=True, slots=True)
class ShopDifference:
    """A row that differs between the source and a consumer."""

    source: str
    key: tuple[Any, ...]
    expected: dict[str, Any] | None
    found: dict[str, Any] | None


def differences(expected: dict[str, Rows], found: dict[str, Rows]) -> list[ShopDifference]:
    """Every row that differs, is missing, or is superfluous."""
    unequal = []
    for source in expected.keys() | found.keys():
        theirs, ours = expected.get(source, {}), found.get(source, {})
        for key in theirs.keys() | ours.keys():
            if theirs.get(key) != ours.get(key):
                unequal.append(ShopDifference(source, key, theirs.get(key), ours.get(key)))
    return sorted(unequal, key=lambda item: (item.source, str(item.key)))


def sqlite_connector(path: str) -> Callable[[], sqlite3.Connection]:
    """Connections in autocommit mode to a database file, created if it does not exist."""

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None, timeout=30)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    return connect
