"""MariaDB's and MySQL's statements that make, alter, rename, empty and drop things."""

from __future__ import annotations

from collections.abc import Iterator

from tests.storm.generator import production
from tests.storm.grammar.mysql import TYPES
from tests.storm.grammar.mysql_admin import MySqlAdministration
from tests.storm.mysql_site import CAPTURED, OUTSIDE
from tests.storm.site import TableFacts
from tests.storm.spelling import quoted


class MySqlGrammar(MySqlAdministration):
    """All productions."""

    def first(self) -> list[str]:
        found = [
            self.created(quoted(name), engine)
            for name, engine in (
                ("t1", ""), ("t2", ""), ("t3", ""), ("t4", " ENGINE=MyISAM"), ("a-b", ""),
            )
        ]  # fmt: skip
        found.append(self.created(f"`{OUTSIDE}`.`t1`", ""))
        return [*found, *(f"INSERT IGNORE INTO {quoted(name)} (id) VALUES (1), (2), (3), (4)"
                          for name in ("t1", "t2", "t3", "t4"))]  # fmt: skip

    def created(self, name: str, engine: str | None = None) -> str:
        """A table whose columns are id and one to four others."""
        columns = [
            f"`{letter}` {self.rng.choice(TYPES)}{self.pick('', '', ' NULL')}"
            for letter in "abcd"[: self.rng.randint(1, 4)]
        ]
        is_first = engine is not None
        generated = self.pick("STORED", "VIRTUAL") if self.chance(0.2) else ""
        key = self.pick(
            "INT PRIMARY KEY", "INT NOT NULL AUTO_INCREMENT PRIMARY KEY", "BIGINT PRIMARY KEY"
        )
        if is_first and "AUTO" in key and self.site.product == "mariadb":
            generated = ""  # A new relay refuses such a table, and MariaDB the stored column.
        if generated:
            columns.append(f"`g` INT AS (`id` + 1) {generated}")
        if engine is None:
            engine = self.pick("", "", "", " ENGINE=InnoDB", " ENGINE=MyISAM", " ENGINE=MEMORY")
        if "MEMORY" in engine:
            columns = ["`a` VARCHAR(30)", "`b` INT"]
        return f"CREATE TABLE {name} (`id` {key}, {', '.join(columns)}){engine}"

    # -- made and dropped

    @production(3)
    def p_create_table(self) -> Iterator[str]:
        yield self.created(self.anywhere())

    @production(1)
    def p_create_if_not_exists(self) -> Iterator[str]:
        yield self.created(self.anywhere()).replace("TABLE", "TABLE IF NOT EXISTS", 1)

    @production(1)
    def p_create_like(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"CREATE TABLE {self.anywhere()} LIKE {self.full(table)}"

    @production(1.5)
    def p_create_select(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            key = quoted(table.key[0])
            yield (
                f"CREATE TABLE {self.anywhere()} (PRIMARY KEY ({key})) "
                f"{self.pick('', 'AS ')}SELECT * FROM {self.full(table)}"
            )

    @production(0.3)
    def p_create_without_key(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"CREATE TABLE {self.anywhere()} SELECT * FROM {self.full(table)}"

    @production(2, only="mariadb")
    def p_create_or_replace(self) -> Iterator[str]:
        if table := self.some_table():
            name = self.full(table)
            other = self.some_table()
            kind = self.rng.randrange(3)
            if kind == 0 or other is None or other.source == table.source:
                yield self.created(name).replace("TABLE", "OR REPLACE TABLE", 1)
            elif kind == 1:
                yield f"CREATE OR REPLACE TABLE {name} LIKE {self.full(other)}"
            else:
                yield f"CREATE OR REPLACE TABLE {name} SELECT * FROM {self.full(other)}"

    @production(1)
    def p_temporary_table(self) -> Iterator[str]:
        name, table = self.name(), self.some_table()
        yield self.created(name, "").replace("TABLE", "TEMPORARY TABLE", 1)
        yield f"INSERT INTO {name} (`id`) VALUES (1), (2)"
        if table:
            yield self.any_dml(table)
            key = quoted(table.columns[0].name)
            yield f"INSERT IGNORE INTO {self.full(table)} ({key}) SELECT `id` + 50 FROM {name}"
        yield f"TRUNCATE TABLE {name}"
        yield f"ALTER TABLE {name} ADD `z` INT"
        yield f"DROP {self.pick('TEMPORARY ', '')}TABLE {name}"

    @production(1)
    def p_drop_table(self) -> Iterator[str]:
        if len(self.base_tables()) > 4 and (table := self.some_table()):
            words = self.pick("TABLE", "TABLE", "TABLE IF EXISTS")
            yield f"DROP {words} {self.full(table)}{self.pick('', '', ' CASCADE')}"

    @production(0.5)
    def p_drop_several(self) -> Iterator[str]:
        tables = self.base_tables()
        if len(tables) > 6:
            chosen = self.rng.sample(tables, 2)
            yield f"DROP TABLE IF EXISTS {', '.join(self.full(t) for t in chosen)}, `no such`"

    @production(2)
    def p_drop_and_create(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"DROP TABLE {self.full(table)}"
            yield self.created(self.full(table))
            yield f"INSERT IGNORE INTO {self.full(table)} (`id`) VALUES (7), (8)"

    # -- emptied and renamed

    @production(4)
    def p_truncate(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"TRUNCATE {self.pick('', 'TABLE ')}{self.full(table)}"

    @production(1)
    def p_truncate_then_drop(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"TRUNCATE TABLE {self.full(table)}"
            if self.chance(0.5):
                yield f"DROP TABLE {self.full(table)}"
                yield self.created(self.full(table))
            else:
                yield f"RENAME TABLE {self.full(table)} TO {self.anywhere()}"

    @production(2)
    def p_rename(self) -> Iterator[str]:
        if table := self.some_table():
            new = self.anywhere()
            yield self.pick(
                f"RENAME TABLE {self.full(table)} TO {new}",
                f"ALTER TABLE {self.full(table)} RENAME {self.pick('TO ', '', 'AS ')}{new}",
            )

    @production(2)
    def p_rename_swap(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table()
        if table and other and table.source != other.source:
            one, two = self.full(table), self.full(other)
            yield f"RENAME TABLE {one} TO `swap`, {two} TO {one}, `swap` TO {two}"

    @production(1.5)
    def p_rename_in(self) -> Iterator[str]:
        """A table of a schema that is not captured replaces one that is."""
        table = self.some_table()
        outside = self.base_tables(captured=False)
        if table and outside and self.site.is_captured(table.schema):
            other = self.rng.choice(outside)
            yield (
                f"RENAME TABLE {self.full(table)} TO `{OUTSIDE}`.`old{self.next_number()}`, "
                f"{self.full(other)} TO {self.full(table)}"
            )

    @production(2.5)
    def p_schema_change_tool(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            new = f"`{table.schema}`.`_{self.next_number()}_new`"
            old = new.replace("new", "old")
            columns = self.listed(self.columns(table))
            yield f"CREATE TABLE {new} LIKE {self.full(table)}"
            if self.chance(0.5):
                yield f"ALTER TABLE {new} {self.change(table)}"
            yield f"INSERT IGNORE INTO {new} ({columns}) SELECT {columns} FROM {self.full(table)}"
            if self.chance(0.3):
                yield f"DELETE FROM {new} WHERE {self.condition(table)}"
            yield f"RENAME TABLE {self.full(table)} TO {old}, {new} TO {self.full(table)}"
            yield f"DROP TABLE IF EXISTS {old}"

    # -- altered

    def change(self, table: TableFacts) -> str:
        """One specification of an ALTER TABLE."""
        others = self.columns(table, key=False)
        column = quoted(self.rng.choice(others or self.columns(table)).name)
        new = quoted(self.pick("a", "b", "c", "d", "e", "neu", "Key", "x y"))
        type_ = self.rng.choice(TYPES)
        column_position = self.pick("", "", " FIRST", f" AFTER {quoted(table.columns[0].name)}")
        default = self.pick("", "", " NOT NULL", " NULL DEFAULT NULL")
        return self.pick(
            f"ADD COLUMN {new} {type_}{default}{column_position}",
            f"ADD {new} {type_}{column_position}",
            f"ADD COLUMN {new} INT DEFAULT 7",
            f"DROP COLUMN {column}",
            f"DROP {column}, ADD {column} {type_}",
            f"CHANGE {column} {new} {type_}{column_position}",
            f"MODIFY {column} {type_}{column_position}",
            f"RENAME COLUMN {column} TO {new}",
            f"ALTER {column} SET DEFAULT NULL",
            f"ALTER {column} DROP DEFAULT",
            f"ADD INDEX `i{self.next_number()}` ({column})",
            f"ADD {new} INT AS (1 + 1) VIRTUAL",
            "COMMENT = 'TRUNCATE TABLE t1'",
            "AUTO_INCREMENT = 1000",
        )

    @production(6)
    def p_alter_table(self) -> Iterator[str]:
        if table := self.some_table():
            changes = [self.change(table) for _ in range(self.rng.choice((1, 1, 1, 2)))]
            yield f"ALTER TABLE {self.full(table)} {', '.join(changes)}"

    @production(1)
    def p_alter_rows_between(self) -> Iterator[str]:
        if table := self.some_table():
            yield f"ALTER TABLE {self.full(table)} ADD `between` INT"
            key = quoted(table.columns[0].name)
            columns = f"({key}, `between`)"
            yield f"INSERT IGNORE INTO {self.full(table)} {columns} VALUES (40, 1), (41, 2)"
            yield f"ALTER TABLE {self.full(table)} DROP `between`"
            if self.chance(0.5):
                yield f"ALTER TABLE {self.full(table)} ADD `between` INT"

    @production(1)
    def p_rebuild(self) -> Iterator[str]:
        if table := self.some_table():
            yield self.pick(
                f"ALTER TABLE {self.full(table)} ENGINE = {self.pick('InnoDB', 'MyISAM')}",
                f"ALTER TABLE {self.full(table)} FORCE",
                f"OPTIMIZE TABLE {self.full(table)}",
                f"ANALYZE TABLE {self.full(table)}",
                f"CHECK TABLE {self.full(table)}",
                f"ALTER TABLE {self.full(table)} CONVERT TO CHARACTER SET "
                + self.pick("utf8mb4", "latin1"),
                f"ALTER TABLE {self.full(table)} ORDER BY {quoted(table.columns[0].name)}",
                f"ALTER TABLE {self.full(table)} ROW_FORMAT = {self.pick('DYNAMIC', 'COMPACT')}",
            )  # fmt: skip

    @production(0.6)
    def p_key_changed(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            key = quoted(table.key[0])
            yield f"ALTER TABLE {self.full(table)} ADD `k2` INT NOT NULL DEFAULT 1"
            yield f"ALTER TABLE {self.full(table)} DROP PRIMARY KEY, ADD PRIMARY KEY ({key}, `k2`)"

    @production(0.5)
    def p_index(self) -> Iterator[str]:
        if table := self.some_table():
            name = f"`i{self.next_number()}`"
            yield f"CREATE INDEX {name} ON {self.full(table)} ({quoted(table.columns[0].name)})"
            yield f"DROP INDEX {name} ON {self.full(table)}"

    # -- partitions

    @production(1)
    def p_partition_table(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            key = quoted(table.key[0])
            yield f"ALTER TABLE {self.full(table)} " + self.pick(
                f"PARTITION BY HASH ({key}) PARTITIONS 3",
                f"PARTITION BY KEY ({key}) PARTITIONS 2",
                f"PARTITION BY RANGE ({key}) (PARTITION `p0` VALUES LESS THAN (4), "
                "PARTITION `p1` VALUES LESS THAN (20), PARTITION `pm` VALUES LESS THAN MAXVALUE)",
                f"PARTITION BY LIST ({key} % 2) (PARTITION `p0` VALUES IN (0), "
                "PARTITION `p1` VALUES IN (1))",
            )

    @production(1.5)
    def p_partition_emptied(self) -> Iterator[str]:
        name = f"`part{self.next_number()}`"
        yield (
            f"CREATE TABLE {name} (`id` INT PRIMARY KEY, `a` VARCHAR(10)) "
            "PARTITION BY RANGE (`id`) "
            "(PARTITION `p0` VALUES LESS THAN (4), PARTITION `p1` VALUES LESS THAN (100))"
        )
        yield f"INSERT INTO {name} VALUES (1, 'a'), (2, 'b'), (5, 'c'), (6, 'd')"
        what = self.rng.randrange(4)
        if what == 0:
            yield f"ALTER TABLE {name} TRUNCATE PARTITION {self.pick('`p0`', '`p1`', 'ALL')}"
        elif what == 1:
            yield f"ALTER TABLE {name} DROP PARTITION `p0`"
        elif what == 2:
            yield f"CREATE TABLE {name[:-1]}x` (`id` INT PRIMARY KEY, `a` VARCHAR(10))"
            yield f"INSERT INTO {name[:-1]}x` VALUES (3, 'x')"
            yield f"ALTER TABLE {name} EXCHANGE PARTITION `p0` WITH TABLE {name[:-1]}x`"
        else:
            yield (
                f"ALTER TABLE {name} REORGANIZE PARTITION `p1` INTO "
                "(PARTITION `p2` VALUES LESS THAN (50), PARTITION `p3` VALUES LESS THAN (200))"
            )
            yield f"ALTER TABLE {name} REMOVE PARTITIONING"

    # -- views, triggers, routines, cascades

    @production(1.5)
    def p_view(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            name = f"`v{self.next_number()}`"
            yield (
                f"CREATE {self.pick('', 'OR REPLACE ', 'ALGORITHM = MERGE ')}VIEW {name} AS "
                f"SELECT * FROM {self.full(table)}"
            )
            columns = self.columns(table)
            yield f"REPLACE INTO {name} ({self.listed(columns)}) VALUES {self.values(columns, 33)}"
            if self.chance(0.4):
                yield "SET binlog_format = STATEMENT"
            yield f"UPDATE {name} SET {self.assignments(table)}"
            yield f"DELETE FROM {name} WHERE {self.condition(table)}"
            yield "SET binlog_format = ROW"
            yield f"DROP VIEW {name}"

    @production(1)
    def p_trigger(self) -> Iterator[str]:
        table, other = self.some_table(with_key=True), self.some_table(with_key=True)
        if table and other and table.source != other.source:
            name = f"`{table.schema}`.`tr{self.next_number()}`"
            when = self.pick("AFTER INSERT", "AFTER UPDATE", "BEFORE DELETE", "BEFORE INSERT")
            body = self.pick(
                f"INSERT IGNORE INTO `{other.schema}`.{quoted(other.name)} "
                f"({quoted(other.key[0])}) VALUES (60)",
                f"DELETE FROM `{other.schema}`.{quoted(other.name)} LIMIT 1",
            )
            yield f"CREATE TRIGGER {name} {when} ON {self.full(table)} FOR EACH ROW {body}"
            if self.chance(0.3):
                yield "SET binlog_format = STATEMENT"
            yield self.insert(table, 2, "REPLACE INTO")
            yield f"UPDATE {self.full(table)} SET {self.assignments(table)}"
            yield "SET binlog_format = ROW"
            if self.chance(0.6):
                yield f"DROP TRIGGER {name}"

    @production(1)
    def p_function_that_writes(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            name = f"`f{self.next_number()}`"
            yield (
                f"CREATE FUNCTION {name}() RETURNS INT {self.pick('', 'DETERMINISTIC ')}"
                f"MODIFIES SQL DATA BEGIN DELETE FROM {self.full(table)} LIMIT 1; RETURN 1; END"
            )
            if self.chance(0.4):
                yield "SET binlog_format = STATEMENT"
            yield self.pick(f"SELECT {name}()", f"DO {name}()", f"SET @x = {name}()")
            yield "SET binlog_format = ROW"
            yield f"DROP FUNCTION {name}"

    @production(1)
    def p_procedure(self) -> Iterator[str]:
        table, other = self.some_table(with_key=True), self.some_table()
        if table and other:
            name = f"`sp{self.next_number()}`"
            body = self.pick(
                f"{self.any_dml(table)}; {self.any_dml(other)};",
                f"TRUNCATE TABLE {self.full(other)}; {self.any_dml(table)};",
                f"START TRANSACTION; {self.any_dml(table)}; COMMIT; {self.any_dml(other)};",
            )
            yield f"CREATE PROCEDURE {name}() BEGIN {body} END"
            yield f"CALL {name}()"
            yield f"DROP PROCEDURE {name}"

    @production(1.5)
    def p_cascade(self) -> Iterator[str]:
        number = self.next_number()
        parent, child = f"`parent{number}`", f"`child{number}`"
        action = self.pick("CASCADE", "SET NULL")
        yield f"CREATE TABLE {parent} (`id` INT PRIMARY KEY, `a` INT)"
        yield (
            f"CREATE TABLE {child} (`id` INT PRIMARY KEY, `p` INT, FOREIGN KEY (`p`) REFERENCES "
            f"{parent} (`id`) ON DELETE {action} ON UPDATE {action})"
        )
        yield f"INSERT INTO {parent} VALUES (1, 1), (2, 2), (3, 3)"
        yield f"INSERT INTO {child} VALUES (1, 1), (2, 2), (3, 3), (4, 2)"
        yield self.pick(
            f"DELETE FROM {parent} WHERE `id` = 2",
            f"UPDATE {parent} SET `id` = 20 WHERE `id` = 2",
            f"REPLACE INTO {parent} VALUES (2, 9)",
            f"DELETE FROM {parent}",
        )

    # -- sequences, schemas, rights, the server

    @production(0.5, only="mariadb")
    def p_sequence(self) -> Iterator[str]:
        name = f"`q{self.next_number()}`"
        yield f"CREATE SEQUENCE {name} START WITH 5"
        yield f"SELECT NEXTVAL({name}), SETVAL({name}, 50)"
        if table := self.some_table(with_key=True):
            key = quoted(table.key[0])
            yield f"INSERT IGNORE INTO {self.full(table)} ({key}) VALUES (NEXTVAL({name}))"
        yield f"DROP SEQUENCE {name}"

    @production(0.4, only="mariadb")
    def p_system_versioning(self) -> Iterator[str]:
        name = f"`sv{self.next_number()}`"
        yield f"CREATE TABLE {name} (`id` INT PRIMARY KEY, `a` INT) WITH SYSTEM VERSIONING"
        yield f"INSERT INTO {name} VALUES (1, 1), (2, 2)"
        yield f"UPDATE {name} SET `a` = 5"
        yield f"DELETE FROM {name} WHERE `id` = 1"
        yield f"DELETE HISTORY FROM {name}"

    @production(0.4)
    def p_schema(self) -> Iterator[str]:
        name = self.pick(CAPTURED[1], OUTSIDE)
        yield f"DROP {self.pick('DATABASE', 'SCHEMA')} {quoted(name)}"
        yield f"CREATE {self.pick('DATABASE', 'SCHEMA')} {quoted(name)}"
        yield self.created(f"{quoted(name)}.`t1`")
        yield f"INSERT IGNORE INTO {quoted(name)}.`t1` (`id`) VALUES (1), (2)"

    @production(0.5)
    def p_rights(self) -> Iterator[str]:
        name = f"'app{self.next_number()}'@'localhost'"
        yield f"CREATE USER {name} IDENTIFIED BY 'secret;TRUNCATE TABLE t1'"
        yield f"GRANT SELECT, INSERT ON `{CAPTURED[0]}`.* TO {name}"
        yield f"REVOKE INSERT ON `{CAPTURED[0]}`.* FROM {name}"
        yield f"DROP USER {name}"

    @production(0.7)
    def p_server_command(self) -> Iterator[str]:
        yield self.pick(
            "FLUSH BINARY LOGS", "FLUSH TABLES", "FLUSH PRIVILEGES", "FLUSH STATUS",
            "SET GLOBAL binlog_row_image = FULL", "FLUSH TABLES WITH READ LOCK; UNLOCK TABLES",
        )  # fmt: skip
