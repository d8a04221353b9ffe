"""Tables that are suspended are resynchronised: by the relay itself, or by one who claims them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig
from databus.common.frame import Op
from databus.common.table_state import TableState, decode_table_state
from tests.support.capture import capturing, database_config, ring_state, streaming
from tests.support.relay_process import ring_frames
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(120)


def states(folder: Path) -> list[TableState]:
    """What the stream says of tables, in order."""
    return [
        decode_table_state(bytes(view.after or b""))
        for view in ring_frames(folder)
        if view.op == Op.TABLE_STATE
    ]


def words(folder: Path) -> list[tuple[str, str]]:
    """The same, without the reasons."""
    return [(one.source, str(one.state)) for one in states(folder)]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    connection.execute("CREATE TABLE calm (id INTEGER PRIMARY KEY, item TEXT)")
    connection.execute("INSERT INTO orders VALUES (1, 'one'), (2, 'two')")
    yield connection
    connection.close()


def config_of(tmp_path: Path, resync: str) -> DatabaseConfig:
    found = database_config("shop", f"sqlite:///{tmp_path}/shop.db", "*")
    return found.model_copy(update={"resync": resync})


def rebuild(shop: sqlite3.Connection) -> None:
    """As SQLite has tables altered: the triggers are gone with the old one."""
    shop.executescript(
        "CREATE TABLE anew (id INTEGER PRIMARY KEY, item TEXT);"
        "INSERT INTO anew VALUES (2, 'changed'), (3, 'three');"
        "DROP TABLE orders; ALTER TABLE anew RENAME TO orders;"
    )


def rows(shop: sqlite3.Connection) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(n,): {"id": n, "item": item} for n, item in shop.execute("SELECT * FROM orders")}


def held(tmp_path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    return ring_state(tmp_path / "data" / "shop").tables.get("main.orders", {})


async def test_a_suspended_table_is_emptied_and_dumped_without_anybody_asking(
    shop: sqlite3.Connection, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "shop"
    async with capturing(config_of(tmp_path, "auto"), tmp_path / "data") as fetcher:
        await streaming(fetcher)
        shop.execute("INSERT INTO orders VALUES (4, 'four')")
        await eventually(lambda: (4,) in held(tmp_path))
        rebuild(shop)
        shop.execute("INSERT INTO calm VALUES (1, 'calm')")
        await eventually(lambda: len(words(folder)) == 3, 20, "followed again")
        assert words(folder) == [
            ("main.orders", "suspended"),
            ("main.orders", "resynchronising"),
            ("main.orders", "followed"),
        ]
        assert "triggers" in states(folder)[0].reason
        assert states(folder)[0].since_scn > 0
        await eventually(lambda: held(tmp_path) == rows(shop))
        shop.execute("UPDATE orders SET item = item || '!'")
        await eventually(lambda: held(tmp_path) == rows(shop))
        assert fetcher.status_document()["tables"] == []
        await fetcher.make_durable()
        assert b'"tables": []' in fetcher.folder.tables.read_bytes()
