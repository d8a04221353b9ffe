"""Columns whose kinds the binlog lists apart, in orders that a wrong count of them would shift."""

from __future__ import annotations

from decimal import Decimal as D
from typing import Any

import pytest

from databus.relay.sources.contract import ChunkRequest
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import opened_on, read_to_end

_SIGNS = (
    "CREATE TABLE signs (id INT PRIMARY KEY, y YEAR, a INT, b BIT(9), c BIGINT UNSIGNED, "
    "d TIMESTAMP(3) NULL, e TINYINT, f DATE, g DOUBLE, h TIME, k MEDIUMINT UNSIGNED, "
    "l DECIMAL(5,2), m ENUM('x','y'), n SMALLINT)"
)
_SIGNED_ROW = (
    "INSERT INTO signs VALUES (-5, 2024, -1, 3, 18446744073709551615, NULL, -128, NULL, -1.5, "
    "NULL, 16777215, -1.25, 'y', -32768)"
)
_CHARSETS = (
    "CREATE TABLE charsets (id INT PRIMARY KEY, g GEOMETRY, a VARCHAR(9) CHARACTER SET latin1, "
    "j JSON, b BLOB, c TEXT CHARACTER SET cp1251, d ENUM('ä','ö') CHARACTER SET latin2, p POINT, "
    "e CHAR(9) CHARACTER SET utf8mb4, f VARBINARY(9), h SET('ж') CHARACTER SET koi8r, "
    "i TINYTEXT CHARACTER SET utf16)"
)
_TEXT_ROW = (
    "INSERT INTO charsets VALUES (1, NULL, 'é', '[1]', 'b', 'ж', 'ö', POINT(1, 2), 'ż', 'f', 'ж', "
    "'😀')"
)


@pytest.mark.parametrize("product", ["mariadb", "mysql"])
async def test_signs_and_character_sets_belong_to_their_columns_in_any_order(
    product: str, request: pytest.FixtureRequest
) -> None:
    database: FreshDatabase = request.getfixturevalue(f"{product}_database")
    async with opened_on(database) as (source, start):
        for statement in (_SIGNS, _SIGNED_ROW, _CHARSETS, _TEXT_ROW):
            database.execute(statement)
        streamed = await read_to_end(source, start)
        catalogue = {schema.source: schema for schema in await source.schemas()}
    signs, texts = (event.after for event in streamed.events())
    assert signs is not None
    assert texts is not None
    found = [signs[name] for name in ("id", "a", "c", "e", "g", "k", "n")]
    assert found == [-5, -1, 2**64 - 1, -128, -1.5, 16777215, -32768]
    assert [texts[name] for name in "acdehi"] == ["é", "ж", "ö", "ż", "ж", "😀"]
    assert [texts[name] for name in "bf"] == [b"b", b"f"]
    for schema in streamed.schemas:
        assert schema == catalogue[schema.source]


async def test_a_vector_before_texts_of_mysql_does_not_shift_their_character_sets(
    mysql_database: FreshDatabase,
) -> None:
    async with opened_on(mysql_database) as (source, start):
        mysql_database.execute(
            "CREATE TABLE v (id INT PRIMARY KEY, v VECTOR(3), t TEXT CHARACTER SET latin1, "
            "u VARCHAR(9) CHARACTER SET cp1251)"
        )
        mysql_database.execute("INSERT INTO v VALUES (1, NULL, 'é', 'ж')")
        (event,) = (await read_to_end(source, start)).events()
    assert event.after == {"id": 1, "v": None, "t": "é", "u": "ж"}


@pytest.mark.parametrize("product", ["mariadb", "mysql"])
async def test_four_hundred_columns_are_counted_and_their_nulls_found_by_both_decoders(
    product: str, request: pytest.FixtureRequest
) -> None:
    database: FreshDatabase = request.getfixturevalue(f"{product}_database")
    # Beyond 250 a count takes three bytes; beyond 255 the catalogue's index does not fit in one.
    names = [f"c{number}" for number in range(400)]
    types = ("INT", "VARCHAR(9)", "DECIMAL(9,2) UNSIGNED", "ENUM('x','y')")
    columns = ", ".join(f"{name} {types[at % 4]}" for at, name in enumerate(names))
    values: list[Any] = [(at, f"v{at}", D(at), "y")[at % 4] for at in range(400)]
    row = [None if at % 7 == 0 or at > 396 else value for at, value in enumerate(values)]
    literals = ", ".join("NULL" if value is None else f"'{value}'" for value in row)
    async with opened_on(database) as (source, start):
        database.execute(f"CREATE TABLE wide (id INT PRIMARY KEY, {columns})")
        database.execute(f"INSERT INTO wide VALUES (1, {literals})")
        database.execute("UPDATE wide SET c399 = 'x'")
        streamed = await read_to_end(source, start)
        chunk = await source.read_chunk(ChunkRequest(f"{database.name}.wide", 10))
        source.use_kernels = False
        slowly = await read_to_end(source, start)
    before = {"id": 1, **dict(zip(names, row, strict=True))}
    after = before | {"c399": "x"}
    inserted, updated = streamed.events()
    assert (inserted.after, updated.before, updated.after) == (before, before, after)
    assert bytes(slowly.data) == bytes(streamed.data)
    assert [chunk.schema.decode_row(row.row) for row in chunk.rows] == [after]
