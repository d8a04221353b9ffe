"""PostgreSQL's statements: rows, transactions and settings of sessions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.storm.generator import production
from tests.storm.grammar.row_words import RowWords
from tests.storm.postgres_site import CAPTURED, OUTSIDE, PostgresSite
from tests.storm.site import Column, TableFacts
from tests.storm.spelling import Dialect, Modes, quoted

NAMES = ("t1", "t2", "t3", "t4", "T6", "order", "a-b", "with space", "Über", 'quo"te', "p.q")
TYPES = (
    "int", "bigint", "text", "varchar(20)", "numeric(10,2)", "timestamptz", "date", "boolean",
    "jsonb", "bytea", "double precision", "smallint", "char(6)", "uuid", "timestamp(3)", "real",
    "int[]", "text[]", "interval",
)  # fmt: skip
TEXTS = ("'plain'", "''", "'it''s'", "'TRUNCATE TABLE t1'", "$q$dollar$q$", "E'a\\tb'", "'☃'")


class PostgresWords(RowWords):
    """What the productions of all files share."""

    site: PostgresSite
    integers = ("integer", "bigint", "smallint")
    dialect = Dialect('"', hash_comments=False, executable=(), nested=True)
    plain_modes = Modes(no_backslash=True)

    def anywhere(self) -> str:
        schema = self.pick("", "", "", CAPTURED[1], OUTSIDE)
        return (f"`{schema}`." if schema else "") + quoted(self.rng.choice(NAMES))

    def full(self, table: TableFacts) -> str:
        if table.schema == "public" and self.chance(0.6):
            return quoted(table.name)
        return f"`{table.schema}`.{quoted(table.name)}"

    def value(self, column: Column) -> str:
        kind, rng = column.type, self.rng
        if column.nullable and self.chance(0.12):
            return "NULL"
        if kind in ("integer", "bigint", "smallint"):
            return str(rng.randint(1, 30))
        if kind.startswith("numeric") or kind in ("double precision", "real"):
            return f"{rng.randint(-99, 99)}.{rng.choice((0, 25, 5, 75))}"
        if kind.startswith("timestamp") or kind == "date":
            return f"'20{rng.randint(10, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}'"
        if kind == "boolean":
            return self.pick("true", "false")
        if kind == "jsonb":
            return """'{"a": [1, "b"], "c": null}'"""
        if kind == "uuid":
            return f"'00000000-0000-0000-0000-0000000000{rng.randint(10, 99)}'"
        if kind.startswith(("mood", "feeling")):
            return "'sad'"
        if kind == "integer[]":
            return self.pick("'{1,2,NULL}'", "'{}'", "'{{1,2},{3,4}}'", "ARRAY[7]")
        if kind == "text[]":
            return self.pick("""'{"a b",NULL,"NULL",""}'""", "ARRAY['it''s', 't1']", "'{}'")
        if kind == "interval":
            return self.pick("'1 year 2 mons -3 days'", "'-00:00:01.5'", "'90 min'", "'0'")
        if kind == "bytea":
            return "'\\x6162'"
        if kind == "text" and self.chance(0.15):
            return f"repeat(md5('{rng.randint(1, 9)}'), 200)"  # toasted
        return self.pick(*TEXTS) if kind == "text" else self.pick("'plain'", "''", "'it''s'")

    def values(self, columns: Iterable[Column], number: int) -> str:
        row = [
            str(number)
            if column.is_key and column.type in ("integer", "bigint")
            else self.value(column)
            for column in columns
        ]
        return f"({', '.join(row)})"

    def insert(self, table: TableFacts, rows: int = 1, end: str = " ON CONFLICT DO NOTHING") -> str:
        return f"INSERT INTO {self.inserted(table, rows)}{end}"

    def inserted_or_ignored(self, table: TableFacts) -> str:
        return self.insert(table, 2)


class PostgresRows(PostgresWords):
    """Rows, transactions, COPY, routines and session settings."""

    @production(10)
    def p_insert(self) -> Iterator[str]:
        if table := self.some_table():
            yield self.insert(table, self.rng.choice((1, 1, 3)))

    @production(3)
    def p_upsert(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            target = ", ".join(quoted(name) for name in table.key)
            end = f" ON CONFLICT ({target}) DO UPDATE SET {self.assignments(table)}"
            yield self.insert(table, 2, end) + self.pick("", " RETURNING *")

    @production(6)
    def p_update(self) -> Iterator[str]:
        if table := self.some_table():
            where = self.pick("", f" WHERE {self.condition(table)}")
            name = self.pick("", "ONLY ") + self.full(table)
            yield f"UPDATE {name} SET {self.assignments(table)}{where}"

    @production(2)
    def p_update_key(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            key = quoted(table.key[0])
            yield f"UPDATE {self.full(table)} SET {key} = {key} + 200 WHERE {key} < 4"

    @production(3)
    def p_delete(self) -> Iterator[str]:
        if table := self.some_table():
            where = self.pick(
                "", f" WHERE {self.condition(table)}", f" WHERE {self.condition(table)}"
            )
            yield f"DELETE FROM {self.full(table)}{where}"

    @production(1)
    def p_with_dml(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table()
        if table and other and table.source != other.source:
            yield f"WITH `x` AS (DELETE FROM {self.full(table)} RETURNING 1) {self.any_dml(other)}"

    @production(1, since=(15,))
    def p_merge(self) -> Iterator[str]:
        table, other = self.some_table(with_key=True), self.some_table(with_key=True)
        if table and other:
            yield (
                f"MERGE INTO {self.full(table)} `x` USING {self.full(other)} `y` ON "
                f"`x`.{quoted(table.key[0])} = `y`.{quoted(other.key[0])} "
                f"WHEN MATCHED THEN UPDATE SET {self.assignments(table)} "
                f"WHEN NOT MATCHED THEN INSERT ({quoted(table.key[0])}) "
                f"VALUES (`y`.{quoted(other.key[0])})"
            )

    @production(1.5)
    def p_copy(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            others = [c for c in self.columns(table, key=False) if c.type == "text"][:1]
            if others:
                columns = f"({quoted(table.key[0])}, {self.listed(others)})"
                yield f"COPY {self.full(table)} {columns} FROM '{self.site.file}'"

    # -- transactions

    @production(4)
    def p_transaction(self) -> Iterator[str]:
        yield self.pick("BEGIN", "START TRANSACTION", "BEGIN ISOLATION LEVEL SERIALIZABLE")
        for _ in range(self.rng.randint(1, 4)):
            if table := self.some_table():
                yield self.any_dml(table)
        if self.chance(0.2) and (table := self.some_table()):
            yield f"TRUNCATE {self.full(table)}"
        yield self.pick("COMMIT", "COMMIT", "END", "ROLLBACK", "COMMIT AND CHAIN")

    @production(2)
    def p_savepoints(self) -> Iterator[str]:
        tables = [table for table in (self.some_table() for _ in range(3)) if table]
        if len(tables) == 3:
            yield "BEGIN"
            yield self.any_dml(tables[0])
            yield "SAVEPOINT `s1`"
            yield self.any_dml(tables[1])
            yield self.pick("ROLLBACK TO `s1`", "RELEASE `s1`", "SAVEPOINT `s2`")
            yield self.any_dml(tables[2])
            yield self.pick("COMMIT", "COMMIT", "ROLLBACK")

    @production(1.5)
    def p_two_phases(self) -> Iterator[str]:
        if table := self.some_table():
            name = f"'x{self.next_number()}'"
            yield "BEGIN"
            yield self.any_dml(table)
            yield f"PREPARE TRANSACTION {name}"
            yield self.pick(f"COMMIT PREPARED {name}", f"ROLLBACK PREPARED {name}")

    @production(1)
    def p_prepared(self) -> Iterator[str]:
        if table := self.some_table():
            name = f"`p{self.next_number()}`"
            yield f"PREPARE {name} AS {self.any_dml(table)}"
            yield f"EXECUTE {name}"
            yield f"EXECUTE {name}"
            yield f"DEALLOCATE {name}"

    @production(1)
    def p_do_block(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table()
        if table and other:
            yield (
                f"DO $do$ BEGIN {self.any_dml(table)}; {self.pick('', 'COMMIT;')} "
                f"{self.any_dml(other)}; {self.pick('', f'TRUNCATE {self.full(other)};')} END $do$"
            )

    @production(0.7)
    def p_several_in_one(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table()
        if table and other:
            yield f"{self.any_dml(table)} ; {self.any_dml(other)} ; TRUNCATE {self.full(other)}"

    @production(0.5)
    def p_lock(self) -> Iterator[str]:
        if table := self.some_table():
            yield "BEGIN"
            yield f"LOCK TABLE {self.full(table)} IN {self.pick('EXCLUSIVE', 'SHARE')} MODE"
            yield self.any_dml(table)
            yield "COMMIT"

    # -- sessions

    @production(1.5)
    def p_session_variable(self) -> Iterator[str]:
        yield "SET " + self.pick(
            "session_replication_role = replica", "session_replication_role = origin",
            "TIME ZONE 'Asia/Kolkata'", "TIME ZONE 'UTC'", "DateStyle = 'German'",
            "DateStyle = 'ISO'", "bytea_output = 'escape'", "synchronous_commit = off",
            "client_encoding = 'LATIN1'", "client_encoding = 'UTF8'", "IntervalStyle = 'iso_8601'",
            "extra_float_digits = 0", "search_path = public, extra", "search_path = public",
        )  # fmt: skip

    @production(0.5)
    def p_logical_message(self) -> Iterator[str]:
        yield f"SELECT pg_logical_emit_message({self.pick('true', 'false')}, 'storm', 'TRUNCATE')"
