"""Options of sources: what each takes, what is refused, and where it is described."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig
from databus.common.errors import ConfigError
from databus.relay.sources.chained.chained_source import RelayOptions
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlOptions
from databus.relay.sources.postgres.protocol.postgres_settings import PostgresOptions
from databus.relay.sources.source_options import SourceOptions, read_options
from databus.relay.sources.sqlite.sqlite_source import SqliteOptions

PAGES: dict[str, type[SourceOptions]] = {
    "mariadb": MySqlOptions,
    "mysql": MySqlOptions,
    "postgresql": PostgresOptions,
    "relay": RelayOptions,
    "sqlite": SqliteOptions,
}
DOCS = Path(__file__).parents[3] / "docs" / "sources"


def options(kind: type[SourceOptions], **given: Any) -> SourceOptions:
    return read_options(
        DatabaseConfig.model_validate(
            {"name": "shop", "url": "relay+http://parent/shop", "options": given}
        ),
        kind,
    )


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (SourceOptions, {"seed": 1}, "unknown option 'seed'; this source has no options"),
        (SqliteOptions, {"pol_ms": 1}, "unknown option 'pol_ms'; did you mean poll_ms?"),
        (SqliteOptions, {"poll_ms": "soon"}, "poll_ms is 'soon': input should be a valid number"),
        (SqliteOptions, {"retain_rows": -1}, "retain_rows is -1: input should be greater than"),
        (MySqlOptions, {"zero_dates": "x"}, "zero_dates is 'x'; it takes error, null, text"),
        (MySqlOptions, {"server_id": 1 << 32}, "server_id is 4294967296: input should be less"),
        (MySqlOptions, {"domain_id": True}, "domain_id is True: input should be a valid integer"),
        (MySqlOptions, {"uuids": "1-2"}, "uuids: '1-2' is not a server UUID"),
        (PostgresOptions, {"sql_ascii_encoding": "X"}, "sql_ascii_encoding: it is 'X'; it takes"),
        (PostgresOptions, {"discover_every": "soon"}, "discover_every: 'soon' is not a duration"),
        (RelayOptions, {"block": "yes"}, "block is 'yes': input should be a valid boolean"),
        (RelayOptions, {"silence_s": "9"}, "silence_s is '9': input should be a valid number"),
    ],
)
def test_a_wrong_option_is_refused_by_name_with_what_it_takes(
    kind: type[SourceOptions], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        options(kind, **given)
    assert refused.value.message.startswith(f"database shop: {said}")


def test_texts_may_be_written_as_numbers_and_whole_numbers_as_real_ones() -> None:
    assert options(MySqlOptions, clock_name=7) == MySqlOptions(clock_name="7")
    assert options(RelayOptions, silence_s=9) == RelayOptions(silence_s=9.0)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_of_a_source_names_each_of_its_options(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    wrong_server = {"mariadb": {"uuids"}, "mysql": {"domain_id"}}.get(page, set())
    for name, field in PAGES[page].model_fields.items():
        assert field.description
        assert name in wrong_server or f"`{name}`" in text, name
