"""SQLite's statements."""

from __future__ import annotations

from collections.abc import Iterator

from tests.storm.generator import Grammar, production
from tests.storm.site import Column, TableFacts
from tests.storm.spelling import Dialect, Modes, quoted
from tests.storm.sqlite_site import SqliteSite

NAMES = ("t1", "t2", "t3", "t4", "T6", "order", "a-b", "with space", "Über", "back`tick")
TYPES = ("INT", "TEXT", "REAL", "BLOB", "VARCHAR(20)", "INTEGER")


class SqliteGrammar(Grammar):
    """All productions."""

    site: SqliteSite

    dialect = Dialect('"', hash_comments=False, executable=())
    plain_modes = Modes(no_backslash=True)
    stays = 0.97  # A transaction locks the whole file.

    def first(self) -> list[str]:
        names = ("t1", "t2", "t3", "a-b")
        filled = [f"INSERT INTO {quoted(n)} (`id`) VALUES (1), (2), (3), (4)" for n in names]
        return [*(self.created(quoted(name)) for name in names), *filled]

    def created(self, name: str) -> str:
        columns = [f"`{c}` {self.rng.choice(TYPES)}" for c in "abcd"[: self.rng.randint(1, 4)]]
        if self.chance(0.15):
            columns.append("`g` INT AS (`id` + 1) " + self.pick("STORED", "VIRTUAL"))
        end = self.pick("", "", "", " WITHOUT ROWID", " STRICT")
        if end == " STRICT":
            columns = ["`a` TEXT", "`b` INTEGER", "`c` REAL", "`d` BLOB"]
        if self.chance(0.1):
            columns.append("`f` TEXT COLLATE own" + self.pick("", " UNIQUE"))
        kind = self.pick("INTEGER PRIMARY KEY", "INTEGER PRIMARY KEY", "INTEGER NOT NULL")
        if end == "" and self.chance(0.2):
            kind = "INTEGER PRIMARY KEY AUTOINCREMENT"
        if kind == "INTEGER NOT NULL":
            columns.append("PRIMARY KEY (`id`)")
        return f"CREATE TABLE {name} (`id` {kind}, {', '.join(columns)}){end}"

    def value(self, column: Column) -> str:
        if column.nullable and self.chance(0.12):
            return "NULL"
        kind = column.type.upper()
        if kind.startswith("INT"):
            return str(self.rng.randint(1, 30))
        if kind == "REAL":
            return f"{self.rng.randint(-9, 9)}.5"
        if kind == "BLOB":
            return "x'6162'"
        return self.pick("'plain'", "''", "'it''s'", "'DELETE FROM t1'", "'☃'")

    def listed(self, table: TableFacts) -> str:
        return ", ".join(quoted(column.name) for column in self.columns(table))

    def insert(self, table: TableFacts, rows: int = 1, verb: str = "INSERT INTO") -> str:
        first = self.rng.randint(1, 60)
        values = ", ".join(
            "("
            + ", ".join(
                str(first + at) if column.is_key else self.value(column)
                for column in self.columns(table)
            )
            + ")"
            for at in range(rows)
        )
        return f"{verb} {quoted(table.name)} ({self.listed(table)}) VALUES {values}"

    def assignments(self, table: TableFacts) -> str:
        column = self.rng.choice(self.columns(table, key=False) or self.columns(table))
        return f"{quoted(column.name)} = {self.value(column)}"

    def condition(self, table: TableFacts) -> str:
        return f"{quoted(table.columns[0].name)} % 3 = {self.rng.randint(0, 2)}"

    def any_dml(self, table: TableFacts) -> str:
        return self.rng.choice(
            (
                f"UPDATE {quoted(table.name)} SET {self.assignments(table)}",
                f"DELETE FROM {quoted(table.name)} WHERE {self.condition(table)}",
                self.insert(table, 2, "INSERT OR IGNORE INTO"),
                self.insert(table, 2, "REPLACE INTO"),
            )
        )

    @production(10)
    def p_insert(self) -> Iterator[str]:
        if table := self.some_table():
            yield self.insert(table, self.rng.choice((1, 3)))

    @production(4)
    def p_insert_or(self) -> Iterator[str]:
        if table := self.some_table():
            word = self.pick("REPLACE", "IGNORE", "ABORT", "FAIL", "ROLLBACK")
            yield self.insert(table, 2, f"INSERT OR {word} INTO")

    @production(1)
    def p_replaced_by_another_key(self) -> Iterator[str]:
        """REPLACE removes rows that have the same value in a second unique index."""
        if (table := self.some_table(with_key=True)) and self.columns(table, key=False):
            column = quoted(self.rng.choice(self.columns(table, key=False)).name)
            name = f"`u{self.next_number()}`"
            yield f"DELETE FROM {quoted(table.name)}"
            yield self.insert(table)
            indexed = self.pick(column, column, f"fold({column})", f"{column} COLLATE own")
            yield f"CREATE UNIQUE INDEX {name} ON {quoted(table.name)} ({indexed})"
            for _ in range(3):
                yield self.insert(table, 1, "INSERT OR REPLACE INTO")
            yield f"UPDATE OR REPLACE {quoted(table.name)} SET {self.assignments(table)}"
            yield f"DROP INDEX {name}"

    @production(3)
    def p_upsert(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            target = quoted(table.key[0])
            change = f"DO UPDATE SET {self.assignments(table)}"
            yield f"{self.insert(table)} ON CONFLICT ({target}) {change}"

    @production(6)
    def p_update(self) -> Iterator[str]:
        if table := self.some_table():
            where = self.pick("", f" WHERE {self.condition(table)}")
            word = self.pick("", "", "OR REPLACE ", "OR IGNORE ")
            yield f"UPDATE {word}{quoted(table.name)} SET {self.assignments(table)}{where}"

    @production(2)
    def p_update_key(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            key = quoted(table.key[0])
            word = self.pick("", "OR REPLACE ")
            step = self.pick("+ 200", "+ 1")
            yield f"UPDATE {word}{quoted(table.name)} SET {key} = {key} {step} WHERE {key} < 9"

    @production(3)
    def p_delete(self) -> Iterator[str]:
        if table := self.some_table():
            where = self.pick("", f" WHERE {self.condition(table)}")
            yield f"DELETE FROM {quoted(table.name)}{where}{self.pick('', ' RETURNING *')}"

    @production(2)
    def p_transaction(self) -> Iterator[str]:
        yield self.pick("BEGIN", "BEGIN IMMEDIATE", "BEGIN EXCLUSIVE", "BEGIN DEFERRED TRANSACTION")
        for _ in range(self.rng.randint(1, 3)):
            if table := self.some_table():
                yield self.any_dml(table)
        yield "SAVEPOINT `s1`"
        if table := self.some_table():
            yield self.any_dml(table)
        yield self.pick("ROLLBACK TO `s1`", "RELEASE `s1`")
        yield self.pick("COMMIT", "END", "ROLLBACK")

    @production(3)
    def p_create_table(self) -> Iterator[str]:
        yield self.created(quoted(self.rng.choice(NAMES)))

    @production(1)
    def p_create_as(self) -> Iterator[str]:
        if table := self.some_table():
            name = quoted(self.rng.choice(NAMES))
            yield f"CREATE TABLE {name} AS SELECT * FROM {quoted(table.name)}"

    @production(1)
    def p_temporary_table(self) -> Iterator[str]:
        name = quoted(f"temp{self.next_number()}")
        yield f"CREATE TEMP TABLE {name} (`id` INTEGER PRIMARY KEY)"
        yield f"INSERT INTO {name} VALUES (1)"
        yield f"DROP TABLE {name}"

    @production(2)
    def p_drop_and_create(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"DROP TABLE {quoted(table.name)}"
            yield self.created(quoted(table.name))
            yield f"INSERT INTO {quoted(table.name)} (`id`) VALUES (7), (8)"

    @production(2)
    def p_rename(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"ALTER TABLE {quoted(table.name)} RENAME TO {quoted(self.rng.choice(NAMES))}"

    @production(2)
    def p_rebuilt(self) -> Iterator[str]:
        """The twelve steps of SQLite's manual for what ALTER TABLE cannot do."""
        if table := self.some_table(with_key=True):
            new, name = f"`new_{self.next_number()}`", quoted(table.name)
            columns = self.columns(table)
            made = ", ".join(
                quoted(c.name) + (" INTEGER PRIMARY KEY" if c.is_key else f" {c.type}")
                for c in columns
            )
            yield "BEGIN IMMEDIATE"
            yield f"CREATE TABLE {new} ({made})"
            where = self.pick("", f" WHERE {self.condition(table)}")
            yield f"INSERT INTO {new} SELECT {self.listed(table)} FROM {name}{where}"
            yield f"DROP TABLE {name}"
            yield f"ALTER TABLE {new} RENAME TO {name}"
            yield "COMMIT"

    @production(5)
    def p_alter_table(self) -> Iterator[str]:
        if table := self.some_table():
            others = self.columns(table, key=False) or self.columns(table)
            column, new = quoted(self.rng.choice(others).name), f"`n{self.rng.randint(1, 6)}`"
            yield f"ALTER TABLE {quoted(table.name)} " + self.pick(
                f"ADD COLUMN {new} {self.rng.choice(TYPES)}", f"ADD {new} INT DEFAULT 7",
                f"RENAME COLUMN {column} TO {new}", f"DROP COLUMN {column}",
                f"ADD {new} INT AS (1 + 1) VIRTUAL",
            )  # fmt: skip

    @production(1)
    def p_trigger(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table()
        if table and other and table.source != other.source:
            name = f"`tr{self.next_number()}`"
            when = self.pick("AFTER INSERT", "BEFORE UPDATE", "AFTER DELETE")
            yield (
                f"CREATE TRIGGER {name} {when} ON {quoted(table.name)} BEGIN "
                f"DELETE FROM {quoted(other.name)} WHERE {self.condition(other)}; END"
            )
            yield self.any_dml(table)
            yield f"DROP TRIGGER IF EXISTS {name}"

    @production(1)
    def p_view(self) -> Iterator[str]:
        if table := self.some_table():
            name = f"`v{self.next_number()}`"
            yield f"CREATE VIEW {name} AS SELECT * FROM {quoted(table.name)}"
            yield (
                f"CREATE TRIGGER {name[:-1]}_i` INSTEAD OF DELETE ON {name} BEGIN "
                f"DELETE FROM {quoted(table.name)} WHERE {self.condition(table)}; END"
            )
            yield f"DELETE FROM {name}"
            yield f"DROP VIEW {name}"

    @production(1)
    def p_cascade(self) -> Iterator[str]:
        number = self.next_number()
        yield "PRAGMA foreign_keys = ON"
        yield f"CREATE TABLE `parent{number}` (`id` INTEGER PRIMARY KEY, `a` INT)"
        yield (
            f"CREATE TABLE `child{number}` (`id` INTEGER PRIMARY KEY, `p` INT REFERENCES "
            f"`parent{number}` ON DELETE CASCADE ON UPDATE SET NULL)"
        )
        yield f"INSERT INTO `parent{number}` VALUES (1, 1), (2, 2)"
        yield f"INSERT INTO `child{number}` VALUES (1, 1), (2, 2), (3, 2)"
        yield self.pick(
            f"DELETE FROM `parent{number}` WHERE `id` = 2",
            f"REPLACE INTO `parent{number}` VALUES (2, 5)",
            f"UPDATE `parent{number}` SET `id` = 9 WHERE `id` = 1",
        )

    @production(1)
    def p_update_from(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table()
        if table and other and table.source != other.source:
            name, there = quoted(table.name), quoted(other.name)
            key, other_key = quoted(table.columns[0].name), quoted(other.columns[0].name)
            yield self.pick(
                f"UPDATE {name} SET {self.assignments(table)} FROM {there} AS `y` "
                f"WHERE {name}.{key} = `y`.{other_key}",
                f"WITH `w` AS (SELECT {other_key} AS `k` FROM {there}) DELETE FROM {name} "
                f"WHERE {key} IN (SELECT `k` FROM `w`)",
                f"INSERT OR IGNORE INTO {name} ({key}) SELECT {other_key} + 100 FROM {there}",
            )

    @production(0.7)
    def p_attached(self) -> Iterator[str]:
        """Another database in the same session, with tables of the same names."""
        if table := self.some_table():
            other, name = f"`aux{self.next_number()}`", quoted(table.name)
            key = quoted(table.columns[0].name)
            yield f"ATTACH DATABASE ':memory:' AS {other}"
            yield f"CREATE TABLE {other}.{name} AS SELECT * FROM main.{name}"
            yield f"DELETE FROM {other}.{name}"
            yield f"INSERT INTO {other}.{name} ({key}) VALUES (90), (91)"
            yield f"INSERT OR IGNORE INTO main.{name} ({key}) SELECT {key} FROM {other}.{name}"
            yield f"DROP TABLE {other}.{name}"
            yield f"DETACH DATABASE {other}"

    @production(0.5)
    def p_trigger_that_refuses(self) -> Iterator[str]:
        if table := self.some_table():
            name = f"`raise{self.next_number()}`"
            yield (
                f"CREATE TRIGGER {name} BEFORE UPDATE ON {quoted(table.name)} "
                f"WHEN NEW.{quoted(table.columns[0].name)} % 2 = 0 BEGIN "
                f"SELECT RAISE({self.pick('ABORT', 'FAIL', 'ROLLBACK')}, 'no'); END"
            )
            yield f"UPDATE {quoted(table.name)} SET {self.assignments(table)}"
            yield f"UPDATE {quoted(table.name)} SET {self.assignments(table)} WHERE 0"
            yield f"DROP TRIGGER IF EXISTS {name}"

    @production(0.5)
    def p_our_triggers_dropped(self) -> Iterator[str]:
        """A migration that drops every trigger that it finds."""
        if (table := self.some_table()) and (found := self.site.triggers(table.name)):
            yield f"DROP TRIGGER {quoted(self.rng.choice(found))}"
            yield self.any_dml(table)

    @production(0.5)
    def p_index(self) -> Iterator[str]:
        if table := self.some_table():
            name = f"`i{self.next_number()}`"
            column = quoted(table.columns[-1].name)
            yield f"CREATE INDEX {name} ON {quoted(table.name)} ({column}) WHERE {column} NOTNULL"
            yield f"DROP INDEX {name}"

    @production(0.3)
    def p_virtual_table(self) -> Iterator[str]:
        name = f"`fts{self.next_number()}`"
        yield f"CREATE VIRTUAL TABLE {name} USING fts5(`a`)"
        yield f"INSERT INTO {name} VALUES ('words to find')"
        yield f"DROP TABLE {name}"

    @production(1)
    def p_pragma(self) -> Iterator[str]:
        yield self.pick(
            "PRAGMA foreign_keys = OFF", "PRAGMA recursive_triggers = ON",
            "PRAGMA recursive_triggers = OFF", "VACUUM", "ANALYZE",
            "PRAGMA wal_checkpoint(TRUNCATE)", "REINDEX",
            "PRAGMA user_version = 7", "PRAGMA optimize",
            "PRAGMA defer_foreign_keys = ON", "PRAGMA legacy_alter_table = ON",
            "PRAGMA legacy_alter_table = OFF", "PRAGMA cache_size = 10", "PRAGMA temp_store = 2",
            "PRAGMA ignore_check_constraints = ON", "PRAGMA incremental_vacuum",
        )  # fmt: skip
