"""A suspended table of MariaDB or MySQL, when its stream ends before it has been resynchronised."""

from __future__ import annotations

import pytest

from databus.common.config import DatabaseConfig
from databus.common.errors import SourceUnavailable
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql import mysql_source as source_module
from databus.relay.sources.mysql.gtid.mysql_lineage import MySqlResumeState
from databus.relay.sources.suspended_tables import TableSuspension
from tests.support.waiting import within

CONFIG = DatabaseConfig.model_validate(
    {"name": "shop", "url": "mariadb://user@127.0.0.1:1/", "sources": ["shop.*"]}
)


class NoServer:
    def __init__(self, settings: object) -> None: ...

    def close(self) -> None: ...


async def test_a_caller_that_waits_for_a_suspended_table_gets_an_error_when_the_stream_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_module, "MySqlConnection", NoServer)
    monkeypatch.setattr(source_module, "load_catalogue", lambda connection, settings: {})
    source = MySqlSource(CONFIG)
    source.restore(
        MySqlResumeState(7, suspended={"shop.odd": TableSuspension(5, "why")}).encode(), None, 7
    )
    async with within(10):
        with pytest.raises(SourceUnavailable, match=r"shop\.odd resumes with the stream"):
            await source.largest_key("shop.odd")
    await source.close()
