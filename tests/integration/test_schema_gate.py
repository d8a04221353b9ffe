"""What the gate predicts of a statement is what a real server and a relay then do."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from databus.cli.gate.migration_files import MigrationStatement
from databus.cli.gate.schema_gate import GateSubject, SchemaGate
from databus.cli.gate.table_effects import Reaction, TableEffect
from databus.common.envelopes.row_types import Product
from databus.common.schema.source_schema import SourceSchema
from tests.storm.replica import RingReplica
from tests.support.capture import capturing, database_config, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PLAIN = "CREATE TABLE {t} (id INT PRIMARY KEY, v INT, name VARCHAR(20))"
ROW = "INSERT INTO {t} (id, v) VALUES (3, 30)"
Case = tuple[str, str, str]


def case(alter: str, row: str = ROW, create: str = PLAIN) -> Case:
    return create, alter, row


BOTH: dict[str, Case] = {
    "nullable": case("ALTER TABLE {t} ADD COLUMN note VARCHAR(40)"),
    "defaulted": case("ALTER TABLE {t} ADD COLUMN d INT DEFAULT 7"),
    "required": case("ALTER TABLE {t} ADD d INT NOT NULL DEFAULT 1"),
    "null_default": case("ALTER TABLE {t} ADD d INT DEFAULT NULL"),
    "dropped": case("ALTER TABLE {t} DROP COLUMN name"),
    "renamed": case("ALTER TABLE {t} RENAME COLUMN name TO title"),
    "truncated": case("TRUNCATE TABLE {t}"),
    "gone": case("DROP TABLE {t}", ""),
    "indexed": case("CREATE INDEX {t}_v ON {t} (v)"),
    "several": case("ALTER TABLE {t} ADD a INT, DROP COLUMN name, ADD b DECIMAL(12,3)"),
    "commented": case("/* ; */ ALTER TABLE {t} -- a ';'\n ADD note VARCHAR(9)"),
    "date": case("ALTER TABLE {t} ADD at TIMESTAMP NULL, ADD on_ DATE, ADD d DOUBLE PRECISION"),
}
MARIADB = BOTH | {
    "wider": case("ALTER TABLE {t} MODIFY v BIGINT, MODIFY name VARCHAR(200)"),
    "narrower": case("ALTER TABLE {t} MODIFY name VARCHAR(5)"),
    "retyped": case("ALTER TABLE {t} MODIFY COLUMN v VARCHAR(20)"),
    "first": case("ALTER TABLE {t} ADD COLUMN f CHAR(3) FIRST, ADD g TINYTEXT AFTER id"),
    "changed": case("ALTER TABLE {t} CHANGE name title VARCHAR(20)"),
    "same": case("ALTER TABLE {t} CHANGE name name VARCHAR(30) COMMENT 'not null'"),
    "kinds": case(
        "ALTER TABLE {t} ADD (a BIGINT UNSIGNED, b BOOL, c JSON, d DATETIME(6), e ENUM('x','y''z'),"
        " f BIT, g YEAR, h TIME, i LONGBLOB, j NUMERIC, k UUID, l DECIMAL(5), m BINARY(4), n INET6,"
        " o REAL, p MEDIUMINT ZEROFILL, q CHAR VARYING(7), r FLOAT(30), s SET('a','b'))"
    ),
    "rekeyed": case(
        "ALTER TABLE {t} DROP PRIMARY KEY, ADD PRIMARY KEY (id, v)",
        create="CREATE TABLE {t} (id INT PRIMARY KEY, v INT NOT NULL, name VARCHAR(20))",
    ),
    "keyless": case("ALTER TABLE {t} DROP PRIMARY KEY"),
    "moved": case("RENAME TABLE {t} TO {t}_2", "INSERT INTO {t}_2 (id, v) VALUES (3, 30)"),
    "option": case("ALTER TABLE {t} COMMENT = 'x', ROW_FORMAT = DYNAMIC"),
    "serial": case("ALTER TABLE {t} ADD s INT AUTO_INCREMENT UNIQUE"),
    "created": case(
        "CREATE TABLE {t}_n (a INT, b VARCHAR(9) NOT NULL, PRIMARY KEY (a))",
        "INSERT INTO {t}_n VALUES (1, 'x')",
    ),
    "not_null": case("ALTER TABLE {t} MODIFY v INT NOT NULL"),
    "odd": case("ALTER TABLE {t} ENGINE = MyISAM, ADD note TEXT"),
}
MYSQL = {name: one for name, one in MARIADB.items() if name not in ("kinds", "odd")} | {
    "kinds": case(
        "ALTER TABLE {t} ADD (a BIGINT UNSIGNED, b BOOL, c JSON, d DATETIME(6), e ENUM('x','y''z'),"
        " f BIT, g YEAR, h TIME, i LONGBLOB, j NUMERIC, l DECIMAL(5), m BINARY(4),"
        " o REAL, p MEDIUMINT UNSIGNED, q CHAR VARYING(7), s SET('a','b'))"
    ),
}
POSTGRES = BOTH | {
    "wider": case("ALTER TABLE {t} ALTER name TYPE VARCHAR(200)"),
    "narrower": case("ALTER TABLE {t} ALTER COLUMN name TYPE VARCHAR(5)"),
    "bigger": case("ALTER TABLE {t} ALTER v TYPE bigint"),
    "text": case("ALTER TABLE {t} ALTER name SET DATA TYPE text"),
    "using": case("ALTER TABLE {t} ALTER name TYPE text USING upper(name)"),
    "digits": case(
        "ALTER TABLE {t} ALTER price TYPE numeric(12,2)",
        create="CREATE TABLE {t} (id int PRIMARY KEY, v int, price numeric(10,2))",
    ),
    "scale": case(
        "ALTER TABLE {t} ALTER price TYPE numeric(12,4)",
        create="CREATE TABLE {t} (id int PRIMARY KEY, v int, price numeric(10,2))",
    ),
    "not_null": case("ALTER TABLE {t} ALTER v SET NOT NULL"),
    "kinds": case(
        "ALTER TABLE {t} ADD a int8, ADD b boolean, ADD c jsonb, ADD d timestamptz, ADD e text[],"
        " ADD f bit(3), ADD g char(4), ADD h time(3), ADD i bytea, ADD j numeric, ADD k uuid,"
        " ADD l decimal(5), ADD m interval, ADD n inet, ADD o real, ADD p timestamp(3),"
        " ADD q float8, ADD r character varying(7)"
    ),
    "serial": case("ALTER TABLE {t} ADD s serial"),
    "identity": case("ALTER TABLE {t} ADD s int GENERATED BY DEFAULT AS IDENTITY"),
    "generated": case("ALTER TABLE {t} ADD g int GENERATED ALWAYS AS (v + 1) STORED"),
    "keyless": case("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey"),
    "owner": case("ALTER TABLE {t} SET (fillfactor = 70), ALTER v SET STATISTICS 10"),
    "moved": case("ALTER TABLE {t} RENAME TO {t}_2", ""),
    "rekeyed": case(
        "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (v)",
    ),
}


@pytest.mark.parametrize(
    ("product", "cases"),
    [("mariadb", MARIADB), ("mysql", MYSQL), ("postgresql", POSTGRES)],
    ids=["mariadb", "mysql", "postgres"],
)
async def test_the_gate_predicts_what_the_relay_does(
    product: Product, cases: dict[str, Case], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    fixture = "postgres_database" if product == "postgresql" else f"{product}_database"
    database: FreshDatabase = request.getfixturevalue(fixture)
    schema = "public" if product == "postgresql" else database.name
    for name, (create, _, _) in cases.items():
        database.execute(create.format(t=f"t_{name}"))
    database.execute("CREATE TABLE marks (id INT PRIMARY KEY)")
    # PostgreSQL logs no statement: the relay looks into the catalogue.
    options = {"discover_every": "100ms"} if product == "postgresql" else {}
    config = database_config("shop", database.url, f"{schema}.*", **options)
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        replica = RingReplica(tmp_path / "shop")
        for name in cases:
            insert = f"INSERT INTO t_{name} (id, v) VALUES (1, 10), (2, 20)"
            database.execute(insert)
        await _marked(database, replica, schema, 1)
        known = {source: table.schema for source, table in replica.tables.items()}
        versions = [one for one in known.values() if one is not None]
        gate = SchemaGate(GateSubject(product, versions, default_schema=schema))
        predicted = {}
        for name, (_, alter, row) in cases.items():
            text = alter.format(t=f"t_{name}")
            report = gate.check(MigrationStatement("m.sql", 1, text))
            assert not report.findings, (name, report.findings)
            predicted[name] = {one.effect.source: one.effect for one in report.tables}
            database.execute(text)
            if row:
                database.execute(row.format(t=f"t_{name}"))
        await _marked(database, replica, schema, 2)
        wrong: list[str] = []

        def agree() -> bool:
            replica.read()
            wrong[:] = _disagreements(schema, predicted, known, replica)
            return not wrong

        with contextlib.suppress(TimeoutError, AssertionError):
            await eventually(agree, 20, "the prediction has come true")
    replica.close()
    assert not wrong, "\n".join(wrong)


def _disagreements(
    schema: str,
    predicted: dict[str, dict[str, TableEffect]],
    known: dict[str, SourceSchema | None],
    replica: RingReplica,
) -> list[str]:
    wrong = []
    for name, effects in predicted.items():
        sources = {f"{schema}.t_{name}"} | effects.keys()
        for source in sources:
            state = replica.state(source)
            effect = effects.get(source)
            reaction = effect.reaction if effect is not None else Reaction.FOLLOWED
            if (state is not None) != (reaction is Reaction.SUSPENDED):
                wrong.append(f"{source}: {reaction} {effect and effect.why!r}, but {state}")
            if reaction is Reaction.FOLLOWED:
                expected = effect.after if effect is not None else known[source]
                now = replica.tables[source].schema
                if expected != now:
                    wrong.append(f"{source}: {_differing(expected, now)}")
            if reaction is Reaction.EMPTIED and effect is not None:
                rows = replica.tables[source].rows
                if sorted(rows) != ([] if effect.is_gone else [(3,)]):
                    wrong.append(f"{source}: {sorted(rows)} is left")
    return wrong


async def _marked(database: FreshDatabase, replica: RingReplica, schema: str, number: int) -> None:
    database.execute(f"INSERT INTO marks VALUES ({number})")

    def there() -> bool:
        replica.read()
        table = replica.tables.get(f"{schema}.marks")
        return table is not None and (number,) in table.rows

    await eventually(there, 60, f"the mark {number}")


def _differing(expected: SourceSchema | None, now: SourceSchema | None) -> str:
    if expected is None or now is None:
        return f"{expected} against {now}"
    ours, theirs = set(expected.columns), set(now.columns)
    order = "" if ours != theirs else " in another order, or with another key"
    return f"predicted {ours - theirs}, announced {theirs - ours}{order}"
