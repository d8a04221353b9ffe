"""A table whose changes cannot be known stops alone, is named, and is synchronised again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.frame import Op
from databus.relay.fetcher import Fetcher
from databus.relay.layout import SocketName
from databus.relay.registry import RegistryReader
from tests.support.capture import capturing, database_config, kept_memo, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.relay_process import ring_frames
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HIDING = [
    ("SET binlog_row_image = MINIMAL", "binlog_row_image other than FULL"),
    ("SET binlog_format = STATEMENT", "by a statement instead of rows"),
]


@pytest.fixture(params=["mariadb", "mysql"])
def database(request: pytest.FixtureRequest) -> FreshDatabase:
    found: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    return found


def session(database: FreshDatabase, *statements: str) -> None:
    connection = database.server.connect(database.name)
    try:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
    finally:
        connection.close()


def rows_of(folder: Path, source: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """A table as a consumer has it that takes the last that it is told of each row."""
    reader = RegistryReader(folder / "schemas.jsonl")
    reader.refresh()
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for view in ring_frames(folder):
        if view.is_control:
            continue
        schema = reader.schemas.by_fingerprint(view.schema_fp)
        if schema.source != source:
            continue
        key = tuple(schema.decode_key(view.key).values())
        if view.op == Op.DELETE:
            rows.pop(key, None)
        else:
            assert view.after is not None
            rows[key] = schema.decode_row(view.after)
    return rows


def in_database(database: FreshDatabase, table: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {
        (number,): {"id": number, "v": v}
        for number, v in database.execute(f"SELECT id, v FROM {table}")
    }


async def dump(folder: Path, source: str) -> None:
    with SocketName(folder / "fetcher.sock") as name:
        connector = aiohttp.UnixConnector(path=name.path)
        async with aiohttp.ClientSession(connector=connector) as http:
            async with http.post("http://fetcher/dumps", json={"sources": [source]}) as answer:
                document = await answer.json(content_type=None)
                assert answer.status == 202, document
                number = document["id"]

            async def completed() -> bool:
                async with http.get(f"http://fetcher/dumps/{number}") as answer:
                    document = await answer.json(content_type=None)
                assert document["state"] != "failed", document["error"]
                return bool(document["state"] == "completed")

            await eventually(completed, 60, "the dump is completed")


def warned_of(fetcher: Fetcher, source: str) -> str:
    """The warning in the status about a table."""
    told = fetcher.status.source.get("warnings") or []
    return next((text for text in told if text.startswith(f"{source} has stopped")), "")


@pytest.mark.parametrize(("setting", "named"), HIDING)
async def test_a_table_whose_changes_were_hidden_stops_alone_and_a_dump_takes_it_up_again(
    database: FreshDatabase, tmp_path: Path, setting: str, named: str
) -> None:
    for table in ("calm", "hidden"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")
    config = database_config("shop", database.url, f"{database.name}.*")
    folder = tmp_path / "shop"
    calm, hidden = (f"{database.name}.{table}" for table in ("calm", "hidden"))

    def equal(table: str) -> bool:
        return rows_of(folder, f"{database.name}.{table}") == in_database(database, table)

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO hidden VALUES (1, 1), (2, 2)")
        session(database, setting, "UPDATE hidden SET v = 5 WHERE id = 1")
        database.execute("INSERT INTO hidden VALUES (3, 3)")
        database.execute("INSERT INTO calm VALUES (1, 1)")
        await eventually(lambda: equal("calm"), 60, "the other table goes on")
        assert rows_of(folder, hidden) == {(1,): {"id": 1, "v": 1}, (2,): {"id": 2, "v": 2}}
        await eventually(lambda: named in warned_of(fetcher, hidden), 60)
        assert not warned_of(fetcher, calm)
        await eventually(lambda: hidden in kept_memo(fetcher), 60)
    # It is not forgotten over a restart, and stands in nobody's way.
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO hidden VALUES (4, 4)")
        database.execute("INSERT INTO calm VALUES (2, 2)")
        await eventually(lambda: equal("calm"), 60, "the other table goes on")
        await eventually(lambda: named in warned_of(fetcher, hidden), 60)
        assert (4,) not in rows_of(folder, hidden)
        await dump(folder, hidden)
        await eventually(lambda: equal("hidden"), 60, "the dump has brought its rows")
        database.execute("UPDATE hidden SET v = v + 10")
        await eventually(lambda: equal("hidden"), 60, "its changes are streamed again")
        await eventually(lambda: not fetcher.status.source.get("warnings"), 60)


async def test_a_table_created_or_altered_into_what_cannot_be_read_stops_alone(
    database: FreshDatabase, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE calm (id INT PRIMARY KEY, v INT)")
    config = database_config("shop", database.url, f"{database.name}.*")
    folder, keyless = tmp_path / "shop", f"{database.name}.keyless"

    def equal(table: str) -> bool:
        return rows_of(folder, f"{database.name}.{table}") == in_database(database, table)

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("CREATE TABLE keyless (id INT NOT NULL, v INT)")
        database.execute("INSERT INTO keyless VALUES (1, 1)")
        database.execute("INSERT INTO calm VALUES (1, 1)")
        await eventually(lambda: equal("calm"), 60, "the other table goes on")
        await eventually(lambda: "no primary key" in warned_of(fetcher, keyless), 60)
        await eventually(lambda: keyless in kept_memo(fetcher), 60)
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)  # Its preflight tells of the table, and refuses nothing.
        database.execute("ALTER TABLE keyless ADD PRIMARY KEY (id)")
        database.execute("INSERT INTO keyless VALUES (2, 2)")
        await eventually(lambda: keyless in fetcher.known_sources(), 60, "its new form is told")
        await dump(folder, keyless)
        await eventually(lambda: equal("keyless"), 60, "the dump has brought its rows")
        database.execute("DELETE FROM keyless WHERE id = 1")
        await eventually(lambda: equal("keyless"), 60, "its changes are streamed")
