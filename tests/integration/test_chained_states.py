"""A chained relay passes the states of tables on, also those from before its own start."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from databus.common.config import parse
from databus.relay.local_relay import LocalRelay
from tests.relay.dumps.test_resync import rebuild, rows, words
from tests.support.capture import PACE, upserted
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(120)


async def test_a_child_has_its_parents_states_and_dumps_nothing_itself(tmp_path: Path) -> None:
    shop = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    shop.execute("INSERT INTO orders VALUES (1, 'one'), (2, 'two')")

    def relay(name: str, url: str, resync: str) -> LocalRelay:
        config = parse(
            f'[relay]\nlisten = "127.0.0.1:0"\ndata_dir = "{tmp_path / name}"\n'
            f'[[database]]\nname = "shop"\nurl = "{url}"\nresync = "{resync}"\n'
            'sync_every = "50ms"\nring_bytes = "1MiB"\n'
        )
        return LocalRelay(config, pace=PACE)

    async with relay("parent", f"sqlite:///{tmp_path / 'shop.db'}", "manual") as parent:
        await parent.ready()
        rebuild(shop)
        ring = tmp_path / "parent" / "shop"
        await eventually(lambda: words(ring) == [("main.orders", "suspended")])
        address = parent.url.removeprefix("http://")
        url = f"relay+http://{address}/shop"
        async with relay("child", url, "auto") as child:
            await child.ready()
            tables = child.fetchers["shop"].tables
            await eventually(lambda: [one["state"] for one in tables.document()] == ["suspended"])
            (state,) = tables.document()
            assert "RELAY_URL/shop main.orders" in state["cure"], "the parent's words"
            parent.fetchers["shop"].tables.confirm("main.orders")
            below = tmp_path / "child" / "shop"
            await eventually(lambda: len(words(below)) == 3, 20, "followed")
            await eventually(lambda: not tables.document())
            assert words(below) == words(ring)
            assert upserted(below, "main.orders")[0] == rows(shop)
            assert not list(child.fetchers["shop"].book)
    shop.close()
