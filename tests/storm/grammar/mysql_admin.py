"""MariaDB's and MySQL's statements of administrators: logging, rights, schema changes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from tests.storm.generator import production
from tests.storm.grammar.mysql import MySqlRows
from tests.storm.mysql_site import CAPTURED, RELAY, TABLESPACE, UNLOGGED
from tests.storm.prepared_statements import BINARY
from tests.storm.spelling import quoted


class MySqlAdministration(MySqlRows):
    """Logging, rights, schema changes with triggers, constraints, dynamic statements."""

    # -- what is logged

    @production(0.7, only="mysql", since=(8, 0, 3))
    def p_partial_json(self) -> Iterator[str]:
        name = f"`json{self.next_number()}`"
        yield f"CREATE TABLE {name} (`id` INT PRIMARY KEY, `j` JSON, `a` INT)"
        yield f"""INSERT INTO {name} VALUES (1, '{{"a": [1, 2], "b": "x"}}', 1), (2, '[]', 2)"""
        yield "SET binlog_row_value_options = 'PARTIAL_JSON'"
        yield f"UPDATE {name} SET `j` = JSON_SET(`j`, '$.b', 'longer than before')"
        yield f"UPDATE {name} SET `j` = JSON_REMOVE(`j`, '$.a'), `a` = 7 WHERE `id` = 1"
        yield f"UPDATE {name} SET `j` = JSON_REPLACE(`j`, '$.b', NULL)"
        yield "SET binlog_row_value_options = ''"

    @production(0.7, only="mysql", since=(8, 0, 20))
    def p_compressed_transaction(self) -> Iterator[str]:
        if (table := self.some_table()) and (other := self.some_table()):
            yield "SET binlog_transaction_compression = ON"
            yield "BEGIN"
            yield self.any_dml(table)
            yield self.any_dml(other)
            yield "COMMIT"
            yield "SET binlog_transaction_compression = OFF"

    @production(0.7, only="mariadb")
    def p_compressed_events(self) -> Iterator[str]:
        if table := self.some_table():
            yield "SET GLOBAL log_bin_compress = 1, GLOBAL log_bin_compress_min_len = 10"
            yield self.insert(table, 3, "REPLACE INTO")
            yield self.any_dml(table)
            yield "SET GLOBAL log_bin_compress = 0"

    @production(0.7, only="mariadb")
    def p_other_domain(self) -> Iterator[str]:
        """The relay follows one domain: captured tables that another one changes are suspended."""
        if table := self.some_table():
            yield f"SET gtid_domain_id = {self.pick('7', '8')}"
            yield self.any_dml(table)
            if self.rng.random() < 0.3:
                added = f"`d{self.next_number()}` INT DEFAULT 7"
                yield f"ALTER TABLE {self.full(table)} ADD COLUMN {added}"
            yield "SET gtid_domain_id = DEFAULT"

    @production(0.7, only="mysql")
    def p_other_server(self) -> Iterator[str]:
        """A transaction of a server that is not in the option uuids, as it arrives on a replica."""
        if table := self.some_table():
            server = uuid.UUID(int=self.rng.getrandbits(128))
            yield f"SET gtid_next = '{server}:1'"
            yield self.any_dml(table)
            yield "SET gtid_next = 'AUTOMATIC'"

    @production(0.7)
    def p_logging_variable(self) -> Iterator[str]:
        if table := self.some_table():
            choices = ["GLOBAL binlog_checksum = NONE", "GLOBAL binlog_checksum = CRC32"]
            if self.site.product == "mariadb":
                choices += [
                    "SESSION server_id = 99", "SESSION server_id = 1", "skip_replication = 1",
                    "skip_replication = 0", "binlog_annotate_row_events = 0",
                    "GLOBAL binlog_row_metadata = FULL", "GLOBAL binlog_row_metadata = NO_LOG",
                    "binlog_direct_non_transactional_updates = 1",
                ]  # fmt: skip
            else:
                choices += [
                    "binlog_rows_query_log_events = ON", "binlog_rows_query_log_events = OFF",
                    "GLOBAL binlog_row_metadata = FULL", "GLOBAL binlog_row_metadata = MINIMAL",
                    "binlog_direct_non_transactional_updates = ON",
                ]  # fmt: skip
            yield f"SET {self.pick(*choices)}"
            yield self.any_dml(table)
            yield self.any_dml(table)

    @production(0.3)
    def p_logs_purged(self) -> Iterator[str]:
        yield "FLUSH BINARY LOGS"
        if table := self.some_table():
            yield self.any_dml(table)
        yield "PURGE BINARY LOGS BEFORE NOW()"

    # -- rights

    @production(0.6)
    def p_rights_of_the_relay(self) -> Iterator[str]:
        """An administrator takes a right from the relay, and gives it back."""
        schema = quoted(self.pick(*CAPTURED))
        yield f"REVOKE SELECT ON {schema}.* FROM {RELAY}"
        tables = [table for table in (self.some_table() for _ in range(2)) if table]
        yield from (self.any_dml(table) for table in tables)
        if tables and self.chance(0.4):
            yield f"ALTER TABLE {self.full(tables[0])} ADD `r{self.next_number()}` INT"
            yield self.insert(tables[0], 1, "REPLACE INTO")
        yield f"GRANT SELECT ON {schema}.* TO {RELAY}"

    # -- schema changes

    @production(1.5)
    def p_schema_change_with_triggers(self) -> Iterator[str]:
        """What pt-online-schema-change does."""
        if table := self.some_table(with_key=True):
            number, name = self.next_number(), self.full(table)
            new = f"`{table.schema}`.`_{number}_new`"
            columns, key = self.listed(self.columns(table)), quoted(table.key[0])
            row = ", ".join(f"NEW.{quoted(column.name)}" for column in self.columns(table))
            trigger = f"`{table.schema}`.`pt_{number}"
            yield f"CREATE TABLE {new} LIKE `{table.schema}`.{quoted(table.name)}"
            yield f"ALTER TABLE {new} ADD COLUMN `pt{number}` INT"
            for what, body in (
                ("DELETE", f"DELETE IGNORE FROM {new} WHERE {new}.{key} <=> OLD.{key}"),
                ("UPDATE", f"REPLACE INTO {new} ({columns}) VALUES ({row})"),
                ("INSERT", f"REPLACE INTO {new} ({columns}) VALUES ({row})"),
            ):
                yield (
                    f"CREATE TRIGGER {trigger}_{what[:3].lower()}` AFTER {what} ON {name} "
                    f"FOR EACH ROW {body}"
                )
            yield self.any_dml(table)
            yield (
                f"INSERT LOW_PRIORITY IGNORE INTO {new} ({columns}) "
                f"SELECT {columns} FROM {name} LOCK IN SHARE MODE"
            )
            yield self.any_dml(table)
            yield f"RENAME TABLE {name} TO `{table.schema}`.`_{number}_old`, {new} TO {name}"
            yield f"DROP TABLE IF EXISTS `{table.schema}`.`_{number}_old`"

    @production(1)
    def p_constraint(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table(with_key=True)
        if table and other:
            name, column = f"`c{self.next_number()}`", quoted(self.rng.choice(table.columns).name)
            yield f"ALTER TABLE {self.full(table)} " + self.pick(
                f"ADD UNIQUE KEY {name} ({column})",
                f"ADD CONSTRAINT {name} CHECK ({column} IS NULL OR {column} = {column})",
                f"ADD CONSTRAINT {name} FOREIGN KEY ({column}) REFERENCES {self.full(other)} "
                f"({quoted(other.key[0])}) ON DELETE CASCADE",
                "DISABLE KEYS", "ENABLE KEYS",
            )  # fmt: skip
            yield self.any_dml(table)

    @production(1)
    def p_alter_with_options(self) -> Iterator[str]:
        if table := self.some_table():
            new, kind = f"`o{self.rng.randint(1, 4)}`", self.pick("INT", "INT NOT NULL DEFAULT 3")
            yield f"ALTER TABLE {self.full(table)} ADD COLUMN {new} {kind}, " + self.pick(
                "ALGORITHM = INSTANT", "ALGORITHM = INPLACE, LOCK = NONE", "ALGORITHM = COPY",
                "LOCK = SHARED", "ALGORITHM=DEFAULT",
            )  # fmt: skip
            yield f"ALTER TABLE {self.full(table)} DROP COLUMN {new}, ALGORITHM = COPY"

    @production(0.6, only="mariadb")
    def p_only_if(self) -> Iterator[str]:
        if table := self.some_table():
            new = f"`o{self.rng.randint(1, 4)}`"
            yield self.pick(
                f"ALTER TABLE IF EXISTS {self.full(table)} ADD COLUMN IF NOT EXISTS {new} INT",
                f"ALTER TABLE {self.full(table)} WAIT 1 DROP COLUMN IF EXISTS {new}",
                f"RENAME TABLE IF EXISTS `no such` TO `none`, {self.full(table)} TO "
                f"{self.anywhere()}",
                f"TRUNCATE TABLE {self.full(table)} NOWAIT",
                f"DROP TABLE IF EXISTS `no such`, {self.full(table)} WAIT 1",
            )  # fmt: skip

    @production(0.6)
    def p_binary_protocol(self) -> Iterator[str]:
        """Prepared statements as drivers send them, in both formats of the log."""
        if table := self.some_table(with_key=True):
            is_statement = self.chance(0.3)
            if is_statement:
                yield "SET binlog_format = STATEMENT"
            for _ in range(2):
                yield f"{BINARY} {self.any_dml(table)}"
            if is_statement:
                yield "SET binlog_format = ROW"

    @production(0.4)
    def p_unlogged(self) -> Iterator[str]:
        """Tables that are not captured change without the log; see README.md for the others."""
        tables = self.base_tables(captured=False)
        if tables:
            what = self.any_dml(self.rng.choice(tables))
            yield f"COMMIT; SET {UNLOGGED} = 0; {what}; COMMIT; SET {UNLOGGED} = 1"

    @production(0.4)
    def p_event(self) -> Iterator[str]:
        """The definitions of events; none is due while a case runs."""
        if table := self.some_table():
            name = f"`ev{self.next_number()}`"
            when = self.pick("EVERY 1 DAY STARTS '2037-01-01'", "AT '2037-01-01 00:00:00'")
            yield f"CREATE EVENT {name} ON SCHEDULE {when} DO {self.any_dml(table)}"
            yield f"ALTER EVENT {name} " + self.pick(
                "DISABLE", "ENABLE", "COMMENT 'TRUNCATE TABLE t1'", f"DO {self.any_dml(table)}"
            )
            yield f"DROP EVENT IF EXISTS {name}"

    @production(0.4)
    def p_imported_tablespace(self) -> Iterator[str]:
        """The rows of another table's file replace a table's rows."""
        name = f"ts{self.next_number()}"
        columns = "(`id` INT PRIMARY KEY, `a` INT) ENGINE = InnoDB"
        yield f"CREATE TABLE `{name}` {columns}"
        yield f"INSERT INTO `{name}` VALUES (1, 1), (2, 2)"
        yield f"CREATE TABLE `{name}x` {columns}"
        yield f"INSERT INTO `{name}x` VALUES (9, 9)"
        yield f"FLUSH TABLES `{name}` FOR EXPORT"
        yield f"{TABLESPACE}export {name}"
        yield "UNLOCK TABLES"
        yield f"ALTER TABLE `{name}x` DISCARD TABLESPACE"
        yield f"{TABLESPACE}import {name}x"
        yield f"ALTER TABLE `{name}x` IMPORT TABLESPACE"
        yield f"DELETE FROM `{name}x` WHERE `id` = 9"

    @production(0.3)
    def p_tablespace(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            yield f"ALTER TABLE {self.full(table)} DISCARD TABLESPACE"
            yield f"DROP TABLE {self.full(table)}"

    @production(0.5)
    def p_merge_table(self) -> Iterator[str]:
        number = self.next_number()
        part, merged = f"`mp{number}`", f"`merged{number}`"
        yield f"CREATE TABLE {part} (`id` INT PRIMARY KEY, `a` INT) ENGINE = MyISAM"
        yield (
            f"CREATE TABLE {merged} (`id` INT, `a` INT, KEY (`id`)) ENGINE = MERGE "
            f"UNION = ({part}) INSERT_METHOD = LAST"
        )
        yield f"INSERT INTO {merged} VALUES (1, 1), (2, 2)"
        yield f"UPDATE {merged} SET `a` = 9 WHERE `id` = 1"
        yield self.pick(f"TRUNCATE {merged}", f"DELETE FROM {merged}", f"DROP TABLE {merged}")

    # -- transactions and routines

    @production(1)
    def p_implicit_commit(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table()
        if table and other:
            yield "BEGIN"
            yield self.any_dml(table)
            yield self.pick(
                f"ALTER TABLE {self.full(other)} COMMENT = 'x'",
                f"TRUNCATE {self.full(other)}",
                f"CREATE TABLE `i{self.next_number()}` (`id` INT PRIMARY KEY)",
                "FLUSH TABLES", "SET autocommit = 1", "BEGIN",
            )  # fmt: skip
            yield "ROLLBACK"

    @production(0.7)
    def p_dynamic_in_procedure(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table()
        if table and other:
            name = f"`dyn{self.next_number()}`"
            yield (
                f"CREATE PROCEDURE {name}() BEGIN "
                f"SET @q = 'TRUNCATE TABLE {self.full(other)}'; PREPARE s FROM @q; EXECUTE s; "
                f"DEALLOCATE PREPARE s; {self.any_dml(table)}; END"
            )
            yield f"CALL {name}()"
            yield f"DROP PROCEDURE {name}"

    @production(0.7, only="mysql")
    def p_with_dml(self) -> Iterator[str]:
        table, other = self.some_table(with_key=True), self.some_table(with_key=True)
        if table and other and table.source != other.source:
            key, other_key = quoted(table.key[0]), quoted(other.key[0])
            yield (
                f"WITH `w` AS (SELECT {other_key} AS `k` FROM {self.full(other)}) " + self.pick(
                    f"DELETE FROM {self.full(table)} WHERE {key} IN (SELECT `k` FROM `w`)",
                    f"UPDATE {self.full(table)} SET {self.assignments(table)} "
                    f"WHERE {key} IN (SELECT `k` FROM `w`)",
                )
            )  # fmt: skip

    @production(0.7)
    def p_view_of_two(self) -> Iterator[str]:
        table, other = self.some_table(with_key=True), self.some_table(with_key=True)
        if table and other and table.source != other.source:
            name = f"`v{self.next_number()}`"
            column = quoted(table.columns[-1].name)
            yield (
                f"CREATE VIEW {name} AS SELECT `x`.{column} AS `c`, "
                f"`y`.{quoted(other.key[0])} AS `k` FROM {self.full(table)} AS `x` JOIN "
                f"{self.full(other)} AS `y` ON `x`.{quoted(table.key[0])} = "
                f"`y`.{quoted(other.key[0])}"
            )
            if self.chance(0.4):
                yield "SET binlog_format = STATEMENT"
            yield f"UPDATE {name} SET `c` = {self.value(table.columns[-1])}"
            yield "SET binlog_format = ROW"
            yield f"DROP VIEW {name}"
