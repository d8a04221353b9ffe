"""A column that is renamed changes no byte of its rows: the comparison that ends the table's
suspension has to see that the copy's rows have the old name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log.table_repairs import NOTE
from databus.common.config import Config, RelayConfig
from databus.relay.local_relay import LocalRelay
from tests.integration.test_returning_schemas import opened
from tests.storm.replica import RingReplica
from tests.support.bootstrap_log import note_of, seeded, written_log
from tests.support.capture import PACE, database_config, upserted
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("column", ["v", "id"], ids=["a column", "the key"])
@pytest.mark.parametrize("product", ["postgres", "sqlite", "mariadb", "mysql"])
async def test_rows_have_the_new_name_after_a_bootstrap_server_has_compared_them(
    request: pytest.FixtureRequest, tmp_path: Path, product: str, column: str
) -> None:
    url, schema, execute = opened(product, request, tmp_path)
    execute("CREATE TABLE t (id int NOT NULL PRIMARY KEY, v int)")
    execute("INSERT INTO t VALUES (1, 10), (2, 20)")
    source, folder = f"{schema}.t", tmp_path / "relay" / "shop"
    options: dict[str, Any] = {"discover_every": "100ms"} if product == "postgres" else {}
    config = database_config("shop", url, source, **options)
    relayed = Config(
        relay=RelayConfig(listen="127.0.0.1:0", data_dir=tmp_path / "relay"),
        database=(config.model_copy(update={"resync": "auto"}),),
    )
    async with (
        LocalRelay(relayed, pace=PACE) as relay,
        written_log(tmp_path / "bootstrap", relay.url) as log,
    ):
        await seeded(log, source)
        execute(f"ALTER TABLE t RENAME COLUMN {column} TO renamed")
        names = ("renamed", "v") if column == "id" else ("id", "renamed")

        def rows() -> list[dict[str, Any]]:
            return sorted(upserted(folder, source)[0].values(), key=str)

        wanted = [dict(zip(names, row, strict=True)) for row in ((1, 10), (2, 20))]
        await eventually(lambda: rows() == wanted, 60, "a consumer has the new name")
        await eventually(lambda: not note_of(log, NOTE), 60, "the copy was compared")
        with contextlib.closing(RingReplica(folder)) as replica:
            replica.read()
            await eventually(lambda: log.state().last >= replica.position, 60, "the log has it")
