"""PostgreSQL's statements of administrators: publications, types, constraints, partitions."""

from __future__ import annotations

from collections.abc import Iterator

from tests.storm.generator import production
from tests.storm.grammar.postgres import PostgresRows
from tests.storm.postgres_site import PUBLICATION, RELAY, SLOT
from tests.storm.spelling import quoted


class PostgresAdministration(PostgresRows):
    """Publications, slots, types, constraints, cursors, partitions of all kinds."""

    # -- publications and slots

    @production(0.5, since=(15,))
    def p_publication_cut(self) -> Iterator[str]:
        """A row filter, or a list of columns, in the publication that the relay reads."""
        if table := self.some_table(with_key=True):
            key = quoted(table.key[0])
            cut = self.pick(f" WHERE ({key} > 5)", f" ({key})")
            yield f"ALTER PUBLICATION {PUBLICATION} DROP TABLE {self.full(table)}"
            yield f"ALTER PUBLICATION {PUBLICATION} ADD TABLE {self.full(table)}{cut}"
            yield self.insert(table, 2)
            yield f"ALTER PUBLICATION {PUBLICATION} DROP TABLE {self.full(table)}"
            yield f"ALTER PUBLICATION {PUBLICATION} ADD TABLE {self.full(table)}"

    @production(0.2)
    def p_publication_set(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            yield f"ALTER PUBLICATION {PUBLICATION} SET TABLE {self.full(table)}"
            yield self.any_dml(table)

    @production(0.3)
    def p_other_slot(self) -> Iterator[str]:
        name = f"other{self.next_number()}"
        yield f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"
        yield f"SELECT pg_drop_replication_slot('{name}')"

    @production(0.3)
    def p_walsender_terminated(self) -> Iterator[str]:
        yield "SELECT pg_terminate_backend(pid) FROM pg_stat_replication"
        if table := self.some_table():
            yield self.any_dml(table)

    @production(0.15)
    def p_own_publication_dropped(self) -> Iterator[str]:
        """The stream ends by name, or the tables are suspended (PostgreSQL 18)."""
        yield f"DROP PUBLICATION {PUBLICATION}"
        if (table := self.some_table(with_key=True)) and self.chance(0.6):
            yield self.any_dml(table)
        if self.chance(0.7):
            yield f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES"

    @production(0.1)
    def p_own_slot_lost(self) -> Iterator[str]:
        """By a session that ends the relay's session first."""
        lose = self.pick(
            f"pg_drop_replication_slot('{SLOT}')",
            f"pg_replication_slot_advance('{SLOT}', pg_current_wal_lsn())",
        )
        yield (
            "DO $do$ BEGIN PERFORM pg_terminate_backend(active_pid) FROM pg_replication_slots "
            f"WHERE slot_name = '{SLOT}' AND active_pid IS NOT NULL; PERFORM pg_sleep(0.005); "
            f"PERFORM {lose}; END $do$"
        )

    @production(1.5)
    def p_rights_of_the_relay(self) -> Iterator[str]:
        """In the cases in which it has an account of its own."""
        if table := self.some_table(with_key=True):
            full = self.full(table)
            taken, given = self.rng.choice(
                [
                    (f"REVOKE SELECT ON {full} FROM `{RELAY}`",
                     f"GRANT SELECT ON {full} TO `{RELAY}`"),
                    (f"REVOKE USAGE ON SCHEMA `{table.schema}` FROM `{RELAY}`",
                     f"GRANT USAGE ON SCHEMA `{table.schema}` TO `{RELAY}`"),
                    (f"ALTER ROLE `{RELAY}` NOREPLICATION", f"ALTER ROLE `{RELAY}` REPLICATION"),
                    (f"ALTER ROLE `{RELAY}` NOBYPASSRLS", f"ALTER ROLE `{RELAY}` BYPASSRLS"),
                    (f"ALTER ROLE `{RELAY}` NOLOGIN", f"ALTER ROLE `{RELAY}` LOGIN"),
                ]
            )  # fmt: skip
            yield taken
            yield self.any_dml(table)
            if self.chance(0.3):
                yield "SELECT pg_terminate_backend(pid) FROM pg_stat_replication"
            if self.chance(0.3):
                yield f"ALTER TABLE {full} ADD `r{self.next_number()}` int DEFAULT 3"
            yield given

    # -- definitions

    @production(1)
    def p_enum_renamed(self) -> Iterator[str]:
        """Rows have another value afterwards, and no row is written."""
        number = self.next_number()
        type_, name = f"`feeling{number}`", f"`felt{number}`"
        yield f"CREATE TYPE {type_} AS ENUM ('sad', 'ok')"
        yield f"CREATE TABLE {name} (`id` int PRIMARY KEY, `m` {type_})"
        yield f"INSERT INTO {name} VALUES (1, 'sad'), (2, 'ok'), (3, NULL)"
        yield f"ALTER TYPE {type_} RENAME VALUE 'ok' TO 'fine'"
        if self.chance(0.5):
            yield f"INSERT INTO {name} VALUES (4, 'fine')"

    @production(0.5)
    def p_domain(self) -> Iterator[str]:
        number = self.next_number()
        yield f"CREATE DOMAIN `dom{number}` AS int CHECK (VALUE < 1000) DEFAULT 5"
        if table := self.some_table():
            yield f"ALTER TABLE {self.full(table)} ADD `dom{number}` `dom{number}`"
            yield f"UPDATE {self.full(table)} SET `dom{number}` = 9"
            yield f"DROP DOMAIN `dom{number}` CASCADE"

    @production(1.5)
    def p_constraint(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table(with_key=True)
        if table and other:
            column = quoted(self.rng.choice(table.columns).name)
            name = f"`con{self.next_number()}`"
            yield f"ALTER TABLE {self.full(table)} " + self.pick(
                f"ALTER {column} SET NOT NULL", f"ALTER {column} DROP NOT NULL",
                f"ADD CONSTRAINT {name} CHECK ({column} IS NULL OR {column} = {column}) NOT VALID",
                f"ADD CONSTRAINT {name} UNIQUE ({column})",
                f"ADD CONSTRAINT {name} FOREIGN KEY ({column}) REFERENCES {self.full(other)} "
                "ON DELETE CASCADE NOT VALID",
                "ENABLE ROW LEVEL SECURITY", "FORCE ROW LEVEL SECURITY",
                "DISABLE ROW LEVEL SECURITY", "DISABLE TRIGGER ALL", "ENABLE TRIGGER ALL",
                "OWNER TO CURRENT_USER", f"ALTER {column} SET STATISTICS 10",
            )  # fmt: skip

    @production(1)
    def p_alter_several(self) -> Iterator[str]:
        if (table := self.some_table()) and (others := self.columns(table, key=False)):
            column = quoted(self.rng.choice(others).name)
            new = f"`m{self.rng.randint(1, 4)}`"
            yield (
                f"ALTER TABLE {self.full(table)} DROP COLUMN {column}, ADD {new} text DEFAULT 'd', "
                f"ADD {column} int"
            )
            yield self.insert(table, 1)

    @production(0.6)
    def p_volatile_default(self) -> Iterator[str]:
        """The table is rewritten, each row with a value of its own."""
        if table := self.some_table():
            new = f"`vd{self.rng.randint(1, 3)}`"
            yield f"ALTER TABLE {self.full(table)} ADD {new} " + self.pick(
                "uuid DEFAULT gen_random_uuid()", "bigserial", "timestamptz DEFAULT now()",
                "int GENERATED ALWAYS AS IDENTITY",
            )  # fmt: skip

    @production(0.5, since=(18,))
    def p_virtual_column(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            new = f"`virt{self.rng.randint(1, 3)}`"
            yield (
                f"ALTER TABLE {self.full(table)} ADD {new} int "
                f"GENERATED ALWAYS AS ({quoted(table.key[0])} + 1) VIRTUAL"
            )
            yield self.any_dml(table)

    # -- rows

    @production(0.7, since=(15,))
    def p_merge_that_deletes(self) -> Iterator[str]:
        table, other = self.some_table(with_key=True), self.some_table(with_key=True)
        if table and other:
            key = f"`x`.{quoted(table.key[0])} = `y`.{quoted(other.key[0])}"
            rest = ""
            if self.has(17):
                rest = self.pick("", " WHEN NOT MATCHED BY SOURCE THEN DELETE", " RETURNING `x`.*")
            yield (
                f"MERGE INTO {self.full(table)} `x` USING {self.full(other)} `y` ON {key} "
                f"WHEN MATCHED AND `y`.{quoted(other.key[0])} > 2 THEN DELETE "
                f"WHEN MATCHED THEN DO NOTHING{rest}"
            )

    @production(0.7)
    def p_cursor(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            name = f"`cur{self.next_number()}`"
            yield "BEGIN"
            yield f"DECLARE {name} CURSOR FOR SELECT * FROM {self.full(table)} FOR UPDATE"
            yield f"FETCH NEXT FROM {name}"
            yield self.pick(
                f"UPDATE {self.full(table)} SET {self.assignments(table)} WHERE CURRENT OF {name}",
                f"DELETE FROM {self.full(table)} WHERE CURRENT OF {name}",
            )
            yield f"CLOSE {name}"
            yield self.pick("COMMIT", "COMMIT", "ROLLBACK")

    @production(0.7)
    def p_copy_from_stdin(self) -> Iterator[str]:
        number = self.next_number()
        yield f"CREATE TABLE `copied{number}` (`id` int PRIMARY KEY, `a` text)"
        yield f"COPY `copied{number}` FROM STDIN"
        yield f"COPY (SELECT * FROM `copied{number}`) TO '/dev/null'"

    @production(0.7)
    def p_procedure(self) -> Iterator[str]:
        table, other = self.some_table(), self.some_table()
        if table and other:
            name = f"`proc{self.next_number()}`"
            yield (
                f"CREATE PROCEDURE {name}() LANGUAGE plpgsql AS $fn$ BEGIN {self.any_dml(table)}; "
                f"COMMIT; BEGIN {self.any_dml(other)}; PERFORM 1/0; EXCEPTION WHEN OTHERS THEN "
                f"NULL; END; {self.any_dml(table)}; END $fn$"
            )
            yield f"CALL {name}()"
            yield f"DROP PROCEDURE {name}"

    @production(0.7)
    def p_view_with_trigger(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            name, key = f"`iv{self.next_number()}`", quoted(table.key[0])
            yield f"CREATE VIEW {name} AS SELECT * FROM {self.full(table)}"
            yield (
                f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $fn$ BEGIN "
                f"DELETE FROM {self.full(table)} WHERE {key} = OLD.{key}; RETURN OLD; END $fn$"
            )
            yield (
                f"CREATE TRIGGER {name} INSTEAD OF DELETE ON {name} FOR EACH ROW "
                f"EXECUTE FUNCTION {name}()"
            )
            yield f"DELETE FROM {name} WHERE {key} % 2 = 1"
            yield f"DROP FUNCTION {name}() CASCADE"
            yield f"DROP VIEW {name}"

    @production(0.5)
    def p_discard(self) -> Iterator[str]:
        yield self.pick(
            "DISCARD ALL", "RESET ALL", "SET SESSION AUTHORIZATION DEFAULT",
            "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        )  # fmt: skip

    # -- partitions

    @production(1.2)
    def p_partitions_of_other_kinds(self) -> Iterator[str]:
        name = f"lp{self.next_number()}"
        if self.chance(0.5):
            yield f"CREATE TABLE `{name}` (`id` int PRIMARY KEY, `a` text) PARTITION BY HASH (`id`)"
            parts = ["WITH (MODULUS 2, REMAINDER 0)", "WITH (MODULUS 2, REMAINDER 1)"]
        else:
            yield f"CREATE TABLE `{name}` (`id` int PRIMARY KEY, `a` text) PARTITION BY LIST (`id`)"
            parts = ["IN (1, 2, 3)", "DEFAULT"]
        for number, part in enumerate(parts):
            bound = part if part == "DEFAULT" else f"FOR VALUES {part}"
            yield f"CREATE TABLE `{name}_{number}` PARTITION OF `{name}` {bound}"
        yield f"INSERT INTO `{name}` SELECT n, 'x' || n FROM generate_series(1, 9) AS n"
        yield self.pick(
            f"UPDATE `{name}` SET `id` = `id` + 20", f"TRUNCATE `{name}_1`",
            f"DROP TABLE `{name}_1`", f"DROP TABLE `{name}`",
            f"ALTER TABLE `{name}` ADD `b` int DEFAULT 5",
            f"ALTER TABLE `{name}` DETACH PARTITION `{name}_0`"
            + (self.pick("", " CONCURRENTLY") if self.has(14) else ""),
            f"ALTER TABLE `{name}_0` RENAME TO `{name}_00`",
        )  # fmt: skip
        yield f"DELETE FROM `{name}` WHERE `id` % 2 = 0"

    @production(0.7)
    def p_inherit(self) -> Iterator[str]:
        if table := self.some_table(with_key=True):
            name = f"`inh{self.next_number()}`"
            yield f"CREATE TABLE {name} (LIKE {self.full(table)} INCLUDING ALL)"
            yield f"INSERT INTO {name} ({quoted(table.key[0])}) VALUES (80)"
            yield f"ALTER TABLE {name} INHERIT {self.full(table)}"
            yield f"UPDATE {self.full(table)} SET {self.assignments(table)}"
            yield f"ALTER TABLE {name} NO INHERIT {self.full(table)}"
