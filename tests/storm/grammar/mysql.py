"""MariaDB's and MySQL's statements: DML, transactions and what belongs to sessions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.storm.generator import production
from tests.storm.grammar.row_words import RowWords
from tests.storm.mysql_site import CAPTURED, OUTSIDE, MySqlSite
from tests.storm.site import Column, TableFacts
from tests.storm.spelling import Modes, quoted

NAMES = (
    "t1", "t2", "t3", "t4", "t5", "T6", "order", "a-b", "with space", "Über", "back`tick", "t$1",
)  # fmt: skip
TYPES = (
    "INT", "BIGINT", "VARCHAR(40)", "DECIMAL(10,2)", "TEXT", "DATETIME", "SMALLINT UNSIGNED",
    "CHAR(8)", "VARBINARY(20)", "DATE", "ENUM('a','b','it''s')", "DOUBLE", "BLOB",
    "VARCHAR(20) CHARACTER SET latin1", "TINYINT(1)", "SET('x','y')",
    "JSON", "TIMESTAMP NULL", "YEAR", "MEDIUMINT", "FLOAT", "LONGTEXT CHARACTER SET utf8mb4",
)  # fmt: skip
TEXTS = (
    "'plain'", "''", "'it''s'", "'TRUNCATE TABLE `t1`'", "'/* x */ -- y'", "'a;b'",
    '\'"quoted"\'', "'`t2`'", "x'6162'", "'RENAME TABLE t1 TO t2'", "CONCAT('a', 'b')",
)  # fmt: skip


class MySqlWords(RowWords):
    """What the productions of all files share."""

    site: MySqlSite
    integers = ("int", "bigint", "smallint")

    def name(self, schema: str = "") -> str:
        """A name for something new, maybe one that is taken."""
        return (f"{quoted(schema)}." if schema else "") + quoted(self.rng.choice(NAMES))

    def anywhere(self) -> str:
        """A name for a new table in any schema; mostly in the session's own."""
        return self.name(self.pick("", "", "", CAPTURED[0], CAPTURED[1], OUTSIDE))

    def full(self, table: TableFacts) -> str:
        if table.schema == CAPTURED[0] and self.chance(0.6):
            return quoted(table.name)
        return f"{quoted(table.schema)}.{quoted(table.name)}"

    def value(self, column: Column) -> str:
        kind, rng = column.type.lower(), self.rng
        if column.nullable and self.chance(0.1):
            return "NULL"
        if self.chance(0.05):
            return "DEFAULT"
        if kind in ("int", "bigint", "smallint", "mediumint"):
            return str(rng.randint(1, 30))
        if kind in ("tinyint", "bit"):
            return str(rng.randint(0, 1))
        if kind == "float":
            return f"{rng.randint(-99, 99)}.{rng.choice((0, 25, 5, 75))}"
        if kind in ("decimal", "double"):
            return f"{rng.randint(-99, 99)}.{rng.randint(0, 99):02}"
        if kind in ("datetime", "date", "timestamp"):
            day = f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
            return self.pick("NOW()", f"'{day}'") if kind != "date" else f"'{day}'"
        if kind == "year":
            return str(rng.randint(1990, 2030))
        if kind == "enum":
            return self.pick("'a'", "'b'", "1")
        if kind == "set":
            return self.pick("'x'", "'x,y'", "''")
        if kind == "json" or column.name.startswith("j"):
            return """'{"a": [1, "b"]}'"""
        return self.text()

    def text(self) -> str:
        modes = self.modes.get(self.session, Modes())
        odd = "'back\\'" if modes.no_backslash else "'it\\'s back\\\\'"
        return self.pick(*TEXTS, odd)

    def values(self, columns: Iterable[Column], number: int) -> str:
        row = []
        for column in columns:
            if column.is_key and "char" not in column.type:
                row.append(str(number))
            elif column.is_automatic and self.chance(0.3):
                row.append("NULL")
            else:
                row.append(self.value(column))
        return f"({', '.join(row)})"

    def insert(self, table: TableFacts, rows: int = 1, verb: str = "INSERT INTO") -> str:
        return f"{verb} {self.inserted(table, rows)}"

    def inserted_or_ignored(self, table: TableFacts) -> str:
        return self.insert(table, verb=self.pick("INSERT IGNORE INTO", "REPLACE INTO"))


class MySqlRows(MySqlWords):
    """Rows, transactions, prepared statements, XA, files and session variables."""

    @production(10)
    def p_insert(self) -> Iterator[str]:
        if table := self.some_table():
            yield self.insert(table, self.rng.choice((1, 1, 1, 3)))

    @production(3)
    def p_insert_ignore(self) -> Iterator[str]:
        if table := self.some_table():
            yield self.insert(table, 2, "INSERT IGNORE INTO")

    @production(3)
    def p_replace(self) -> Iterator[str]:
        if table := self.some_table():
            yield self.insert(table, 2, "REPLACE INTO")

    @production(2)
    def p_insert_on_duplicate(self) -> Iterator[str]:
        if table := self.some_table():
            sql = self.insert(table, 2)
            yield f"{sql} ON DUPLICATE KEY UPDATE {self.assignments(table)}"

    @production(2)
    def p_insert_select(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table(with_key=True)
        if table and other:
            columns = self.columns(table)
            key = quoted(other.key[0])
            selected = ", ".join(
                f"{key} + 100" if column.is_key else self.value(column).replace("DEFAULT", "NULL")
                for column in columns
            )
            yield (
                f"INSERT IGNORE INTO {self.full(table)} ({self.listed(columns)}) "
                f"SELECT {selected} FROM {self.full(other)}"
            )

    @production(1)
    def p_insert_set(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"INSERT IGNORE INTO {self.full(table)} SET {self.assignments(table)}"

    @production(1, only="mariadb")
    def p_returning(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"{self.insert(table, 2, 'REPLACE INTO')} RETURNING *"
            yield f"DELETE FROM {self.full(table)} WHERE {self.condition(table)} RETURNING *"

    @production(6)
    def p_update(self) -> Iterator[str]:
        if table := self.some_table():
            yield (
                f"UPDATE {self.full(table)} SET {self.assignments(table)} "
                f"WHERE {self.condition(table)}"
            )

    @production(1)
    def p_update_all(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"UPDATE {self.full(table)} SET {self.assignments(table)}"

    @production(2)
    def p_update_key(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            key = quoted(table.key[0])
            yield f"UPDATE {self.full(table)} SET {key} = {key} + 200 ORDER BY {key} DESC LIMIT 2"

    @production(1)
    def p_update_join(self) -> Iterator[str]:
        table, other = self.some_table(with_key=True), self.some_table(with_key=True)
        if table and other and table.source != other.source:
            column = quoted(self.rng.choice(table.columns).name)
            yield (
                f"UPDATE {self.full(table)} AS `x` JOIN {self.full(other)} AS `y` ON "
                f"`x`.{quoted(table.key[0])} = `y`.{quoted(other.key[0])} "
                f"SET `x`.{column} = `x`.{column}, `y`.{quoted(other.columns[-1].name)} = DEFAULT"
            )

    @production(3)
    def p_delete(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"DELETE FROM {self.full(table)} WHERE {self.condition(table)}"

    @production(1)
    def p_delete_limit(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            yield f"DELETE FROM {self.full(table)} ORDER BY {quoted(table.key[0])} LIMIT 2"

    @production(0.7)
    def p_delete_all(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"DELETE FROM {self.full(table)}"

    @production(1)
    def p_delete_join(self) -> Iterator[str]:
        table, other = self.some_table(with_key=True), self.some_table(with_key=True)
        if table and other and table.source != other.source:
            yield (
                f"DELETE `x` FROM {self.full(table)} AS `x` JOIN {self.full(other)} AS `y` "
                f"ON `x`.{quoted(table.key[0])} = `y`.{quoted(other.key[0])}"
            )

    @production(1.5)
    def p_load_data(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            columns = [c for c in self.columns(table) if not c.is_key or c.type == "int"][:2]
            kind = self.pick("REPLACE", "IGNORE")
            yield (
                f"LOAD DATA LOCAL INFILE '{self.site.file}' {kind} INTO TABLE {self.full(table)} "
                f"FIELDS TERMINATED BY '\t' ({self.listed(columns)})"
            )

    # -- transactions

    @production(4)
    def p_transaction(self) -> Iterator[str]:
        yield self.pick("BEGIN", "START TRANSACTION", "START TRANSACTION WITH CONSISTENT SNAPSHOT")
        for _ in range(self.rng.randint(1, 4)):
            if table := self.some_table():
                yield self.any_dml(table)
        yield self.pick("COMMIT", "COMMIT", "COMMIT AND CHAIN", "ROLLBACK", "COMMIT WORK")

    @production(2)
    def p_savepoints(self) -> Iterator[str]:
        tables = [table for table in (self.some_table() for _ in range(4)) if table]
        if len(tables) == 4:
            yield "BEGIN"
            yield self.any_dml(tables[0])
            yield "SAVEPOINT `s1`"
            yield self.any_dml(tables[1])
            yield "SAVEPOINT `s 2`"
            yield self.any_dml(tables[2])
            yield self.pick("ROLLBACK TO `s1`", "ROLLBACK TO SAVEPOINT `s 2`")
            yield self.any_dml(tables[3])
            yield self.pick("RELEASE SAVEPOINT `s1`", "SAVEPOINT `s3`")
            yield self.pick("COMMIT", "COMMIT", "ROLLBACK")

    @production(1.5)
    def p_xa(self) -> Iterator[str]:
        tables = [table for table in (self.some_table() for _ in range(2)) if table]
        if tables:
            number = self.next_number()
            name = f"'x{number}'" + self.pick("", ",'b'", ",'b',3")
            yield f"XA {self.pick('START', 'BEGIN')} {name}"
            yield from (self.any_dml(table) for table in tables)
            yield f"XA END {name}"
            if self.chance(0.2):
                yield f"XA COMMIT {name} ONE PHASE"
            else:
                yield f"XA PREPARE {name}"
                yield f"XA {self.pick('COMMIT', 'COMMIT', 'ROLLBACK')} {name}"

    @production(1)
    def p_autocommit_off(self) -> Iterator[str]:
        if table := self.some_table():
            yield "SET autocommit = 0"
            yield self.any_dml(table)
            yield self.any_dml(table)
            yield self.pick("COMMIT", "ROLLBACK")
            yield "SET autocommit = 1"

    @production(2)
    def p_prepared(self) -> Iterator[str]:
        if table := self.some_table():
            text = self.pick(self.any_dml(table), f"TRUNCATE {self.full(table)}")
            text = text.replace("\\", "").replace("'", "''")
            yield f"PREPARE `p1` FROM '{text}'"
            yield "EXECUTE `p1`"
            if self.chance(0.5):
                yield "EXECUTE `p1`"
            yield "DEALLOCATE PREPARE `p1`"

    @production(1, only="mariadb")
    def p_execute_immediate(self) -> Iterator[str]:
        if table := self.some_table():
            text = self.any_dml(table).replace("\\", "").replace("'", "''")
            yield f"EXECUTE IMMEDIATE '{text}'"

    @production(0.7)
    def p_several_in_one(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table()
        if table and other:
            yield f"{self.any_dml(table)} ; {self.any_dml(other)} ; TRUNCATE {self.full(other)}"

    @production(0.7)
    def p_anonymous_block(self) -> Iterator[str]:
        if self.site.product == "mariadb" and (table := self.some_table()):
            yield (
                f"BEGIN NOT ATOMIC {self.any_dml(table)}; TRUNCATE TABLE {self.full(table)}; "
                f"{self.any_dml(table)}; END"
            )

    @production(0.6)
    def p_lock_tables(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"LOCK TABLES {self.full(table)} WRITE"
            yield self.any_dml(table)
            yield "UNLOCK TABLES"

    # -- sessions

    @production(1)
    def p_statement_format(self) -> Iterator[str]:
        tables = [table for table in (self.some_table() for _ in range(2)) if table]
        if tables:
            yield f"SET binlog_format = {self.pick('STATEMENT', 'MIXED', 'STATEMENT')}"
            yield from (self.any_dml(table) for table in tables)
            if self.chance(0.3):
                yield from self.p_load_data()
            yield "SET binlog_format = ROW"

    @production(0.5)
    def p_row_image(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"SET binlog_row_image = {self.pick('MINIMAL', 'NOBLOB')}"
            yield self.any_dml(table)
            yield f"UPDATE {self.full(table)} SET {self.assignments(table)}"
            yield "SET binlog_row_image = FULL"

    @production(1.5)
    def p_sql_mode(self) -> Iterator[str]:
        ansi, plain = self.chance(0.5), self.chance(0.4)
        wanted = [
            word for word, on in (("ANSI_QUOTES", ansi), ("NO_BACKSLASH_ESCAPES", plain)) if on
        ]
        wanted += [self.pick("", "STRICT_TRANS_TABLES", "NO_AUTO_VALUE_ON_ZERO", "PIPES_AS_CONCAT")]
        self.modes[self.session] = Modes(ansi, plain)
        yield f"SET sql_mode = '{','.join(word for word in wanted if word)}'"

    @production(1)
    def p_session_variable(self) -> Iterator[str]:
        yield "SET " + self.pick(
            "foreign_key_checks = 0", "foreign_key_checks = 1", "unique_checks = 0",
            "NAMES latin1", "NAMES utf8mb4", "time_zone = '+05:30'", "time_zone = '-08:00'",
            "timestamp = 1700000000", "timestamp = DEFAULT", "insert_id = 77",
            "SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", "auto_increment_increment = 3",
            "SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE", "character_set_results = binary",
            "default_storage_engine = MyISAM", "default_storage_engine = InnoDB",
        )  # fmt: skip

    @production(1, only="mariadb")
    def p_set_statement(self) -> Iterator[str]:
        if table := self.some_table():
            setting = self.pick(
                "max_statement_time = 5", "sort_buffer_size = 100000", "sql_mode = 'ANSI_QUOTES'",
                "binlog_row_image = MINIMAL", "foreign_key_checks = 0",
            )  # fmt: skip
            what = self.pick(f"TRUNCATE TABLE {self.full(table)}", self.any_dml(table))
            if "ANSI" not in setting or '"' not in what:
                yield f"SET STATEMENT {setting} FOR {what}"
