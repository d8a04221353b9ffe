"""Character sets of MariaDB and MySQL: stream and dump have the values that the server has."""

from __future__ import annotations

import re

import pytest

from databus.common.errors import UnsupportedChange
from databus.relay.sources.contract import ChunkRequest
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import opened_on, read_to_end

OF_UNICODE = ("ucs2", "utf16", "utf16le", "utf32", "utf8mb3", "utf8mb4")
# Codes that two others share a character with, or that have none: such as Python's codecs of
# the same names take for something else, or not at all.
PECULIAR = {
    "big5": "a15aa1c3a1c5a1fea240a2cca2cea451f9fe61",
    "cp932": "81ad81605c7ea1fa40fcfc61",
    "eucjpms": "a1c1a1c2a1dda1f1a2af8ea18fa2b78ffefe61",
    "euckr": "814181fec9a1fefe61",
    "gb2312": "a2a1d7fcb0a161",
    "gbk": "a140a2abfefe814061",
    "sjis": "815f81ad5c7ea1fcfc61",
    "ujis": "a1c0a2af8ea18ffefc5c61",
}


async def test_all_characters_are_the_servers_in_stream_and_dump(database: FreshDatabase) -> None:
    plane = "".join(chr(code) for code in range(1, 0x10000) if not 0xD800 <= code < 0xE000)
    names = (*OF_UNICODE, *PECULIAR)
    texts = dict.fromkeys(names, plane)
    texts |= dict.fromkeys(("utf16", "utf16le", "utf32", "utf8mb4"), plane + "😀𠀀\U0010ffff")
    converted = [f"CONVERT(_utf8mb4 x'{texts[n].encode().hex()}' USING {n})" for n in names]
    peculiar = [f"_{name} x'{PECULIAR[name]}'" if name in PECULIAR else "'a'" for name in names]
    columns = [f"{name} LONGTEXT CHARACTER SET {name}" for name in names]
    label = "e ENUM('x', '갂') CHARACTER SET euckr"
    database.execute(f"CREATE TABLE t (id INT PRIMARY KEY, {', '.join(columns)}, {label})")
    async with opened_on(database) as (source, start):
        database.transaction(
            "SET sql_mode = ''",
            f"INSERT INTO t VALUES (1, {', '.join(converted)}, '갂')",
            f"INSERT INTO t VALUES (2, {', '.join(peculiar)}, 'x')",
        )
        streamed = [event.after for event in (await read_to_end(source, start)).events()]
        chunk = await source.read_chunk(ChunkRequest(f"{database.name}.t", 10))
    dumped = [chunk.schema.decode_row(row.row) for row in chunk.rows]
    columns = ["id", *names, "e"]
    wanted = [
        dict(zip(columns, row, strict=True))
        for row in database.execute(f"SELECT {', '.join(columns)} FROM t ORDER BY id")
    ]
    for row, streamed_row, read in zip(wanted, streamed, dumped, strict=True):
        assert streamed_row is not None
        for column in columns:
            assert streamed_row[column] == row[column], column
            assert read[column] == row[column], column
    assert {name: wanted[0][name] for name in OF_UNICODE} == {n: texts[n] for n in OF_UNICODE}
    assert [wanted[0]["e"], str(wanted[1]["euckr"])[0]] == ["갂", "갂"]


@pytest.mark.parametrize(
    ("database", "charset", "stored"),
    [
        ("mariadb", "ucs2", "0061d83d"),
        ("mysql", "ucs2", "0061d83d"),
        ("mariadb", "ucs2", "d83dde00"),
        ("mysql", "ucs2", "d83dde00"),
        ("mariadb", "utf8mb4", "61eda080"),  # MySQL stores no such thing.
        ("mariadb", "utf8mb3", "eda080"),
    ],
    indirect=["database"],
)
async def test_half_a_surrogate_pair_is_no_text_and_suspends_its_table_alone_and_fails_a_dump(
    database: FreshDatabase, charset: str, stored: str
) -> None:
    name = database.name
    database.execute(f"CREATE TABLE t (id INT PRIMARY KEY, v TEXT CHARACTER SET {charset})")
    database.execute("CREATE TABLE other (id INT PRIMARY KEY)")
    async with opened_on(database) as (source, start):
        database.transaction(
            "INSERT INTO other VALUES (1)",
            "INSERT INTO t VALUES (1, '힣')",
            f"INSERT INTO t VALUES (2, _{charset} x'{stored}')",
            "INSERT INTO other VALUES (2)",
        )
        for keys in (None, [[2]]):
            request = ChunkRequest(f"{name}.t", 10, keys=keys)
            with pytest.raises(UnsupportedChange, match=rf"{name}\.t: column v .*no text"):
                await source.read_chunk(request)
        assert len((await source.read_chunk(ChunkRequest(f"{name}.other", 10))).rows) == 2
        streamed = await read_to_end(source, start)
        assert [event.key["id"] for event in streamed.events(f"{name}.other")] == [1, 2]
        assert [event.after for event in streamed.events(f"{name}.t")] == [{"id": 1, "v": "힣"}]
        (suspension,) = (await source.status())["stopped_tables"].items()
    assert suspension[0] == f"{name}.t"
    assert re.search(rf"column v: x'{stored}' is no {charset} text", suspension[1]["why"])
