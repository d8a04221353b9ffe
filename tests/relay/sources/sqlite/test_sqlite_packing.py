"""SQLite as a source: chunks of its tables, and its log in blocks, by the kernel as by Python."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig
from databus.common.errors import (
    UnsupportedChange,
)
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.sqlite import sqlite_log as log
from databus.relay.sources.sqlite.sqlite_packing import read_block
from databus.relay.sources.sqlite.sqlite_source import SqliteSource
from tests.support.sqlite_source import Reader


async def test_chunks_give_every_row_once_in_key_order(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    for shop in range(3):
        for code in ("a", "b", "ü"):
            writer.execute("INSERT INTO line VALUES (?, ?, 1)", (shop, code))
    after, found = None, []
    while True:
        chunk = await source.read_chunk(ChunkRequest("main.line", limit=2, after=after))
        found += [tuple(chunk.schema.decode_row(row.row).values())[:2] for row in chunk.rows]
        assert chunk.snapshot.high == 10
        assert chunk.snapshot.sees(10, "")
        assert not chunk.snapshot.sees(11, "")
        after = chunk.last_key
        if chunk.done:
            break
    assert found == [(shop, code) for shop in range(3) for code in ("a", "b", "ü")]
    assert await source.largest_key("main.line") == [2, "ü"]


async def test_a_text_that_is_none_fails_a_chunk_with_its_column_and_is_not_tried_again(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    writer.execute("INSERT INTO item (id, name, photo) VALUES (1, CAST(x'61ff' AS TEXT), x'01')")
    with pytest.raises(UnsupportedChange, match="column 'name'") as caught:
        await source.read_chunk(ChunkRequest("main.item", limit=10))
    # The values of a column that a rule hides must not be in an error.
    assert caught.value.details == {"source": "main.item", "column": "name"}
    assert "61" not in caught.value.message and "a\\" not in caught.value.message


async def test_a_chunk_of_keys_reports_the_missing_ones(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    writer.execute("INSERT INTO item (id, photo) VALUES (1, x'01')")
    chunk = await source.read_chunk(ChunkRequest("main.item", limit=10, keys=[[1], [2]]))
    assert [chunk.schema.decode_key(row.key) for row in chunk.rows] == [{"id": 1}]
    assert chunk.missing == [[2]]
    assert chunk.done


async def test_a_chunk_and_the_stream_give_the_same_bytes(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    writer.execute("INSERT INTO item VALUES (1, 'n', 0.25, x'00', 3)")
    reader = Reader(source, 0)
    await reader.until(2)
    chunk = await source.read_chunk(ChunkRequest("main.item", limit=10))
    assert bytes(reader.frames[0].after or b"") == chunk.rows[0].row
    assert bytes(reader.frames[0].key) == chunk.rows[0].key


# -- the kernel

_CELLS: tuple[tuple[object, ...], ...] = (
    (0, 1, -1, 63, 64, -65, 2**31, -(2**63), 2**63 - 1, 10**18, None),
    (0.0, -0.0, 1.5, 0.1, 1e22, 2.5e-7, 1e300, -5e-324, 123456789012345.6, 7, -(2**53), None),
    ("", "plain", '\n\t\r\b\f\x01\x1f " \\ / \x7f', "żółć 😀", "x" * 300, "[1]", "null", None),
    (b"", b"\0\xff", b"\n", bytes(range(256)), None),
    (0, 12, -(2**63), 12.5, -0.25, 1e-5, 1e15, 123456789.125, None),
    ('{"a": [1, "é"]}', None),
)


@pytest.mark.parametrize("keyed", [True, False])
async def test_the_kernel_and_python_give_the_same_bytes(
    path: Path, writer: sqlite3.Connection, keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "id INTEGER PRIMARY KEY" if keyed else "id INTEGER"
    columns = "i INTEGER, f REAL, t TEXT, b BLOB, n NUMERIC, j JSON"
    writer.execute(f"CREATE TABLE wide ({key}, {columns})")
    extra = ", ".join(f"c{number} INTEGER" for number in range(130))
    writer.execute(f"CREATE TABLE many (id INTEGER PRIMARY KEY, {extra})")
    settings_ = {"name": "shop", "url": f"sqlite:///{path}", "keys": {"main.wide": "*"}}
    if keyed:
        del settings_["keys"]
    document = DatabaseConfig.model_validate(settings_ | {"sources": ["main.wide", "main.many"]})
    fast = SqliteSource(document, use_kernel=True)
    slow = SqliteSource(document, use_kernel=False)
    await fast.open()
    assert fast._claim is not None
    slow._claim = fast._claim.dup()  # As if one source.
    await slow.open()
    chooser = random.Random(7)
    for number in range(400):
        row = (number, *(chooser.choice(cells) for cells in _CELLS))
        writer.execute("INSERT INTO wide VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        if number % 3 == 0:
            writer.execute("UPDATE wide SET i = 5, t = 'x' || t WHERE id = ?", (number // 2,))
        if number % 7 == 0:
            writer.execute("UPDATE wide SET id = id + 10000 WHERE id = ?", (number // 2,))
        if number % 11 == 0:
            writer.execute("DELETE FROM wide WHERE id = ?", (number // 3,))
    writer.execute("INSERT INTO many (id, c0, c59, c129) VALUES (1, 2, 3, 4)")
    writer.execute("ALTER TABLE many ADD COLUMN late TEXT")
    await fast.schemas()
    left: list[int] = []
    pack_row = SqliteSource._pack_row

    def counted(self: SqliteSource, *arguments: Any) -> None:
        left.append(self is fast)
        pack_row(self, *arguments)

    monkeypatch.setattr(SqliteSource, "_pack_row", counted)
    results = []
    for source in (fast, slow):
        reader = Reader(source, 0)
        await reader.until(await source.first_scn())
        results.append(b"".join(bytes(view.bytes) for view in reader.frames))
        await source.close()
    assert results[0] == results[1]
    # Only exponents, long fractions and the first row of each version are Python's.
    assert 0 < sum(left) * 2 < len(left) - sum(left)


def test_a_text_that_is_not_utf8_is_marked_and_a_large_block_is_read_in_parts(
    path: Path, writer: sqlite3.Connection
) -> None:
    log.install(writer)
    line = "INSERT INTO databus_log (at_ms, version, op, old, new) VALUES (0, 1, 'c', NULL, ?)"
    for number in range(20):
        writer.execute(line, (f"{number}" * 10,))
    writer.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100)
    blocks, after = [], 0
    while not blocks or not blocks[-1].is_last:
        blocks.append(read_block(writer, after, 1 << 40, 2000))
        after = blocks[-1].last_id
    assert len(blocks) > 3
    assert b"".join(block.text for block in blocks).count(b"\n") == 60
    writer.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 30)
    writer.execute(line.replace("?", "CAST(x'5bff5d' AS TEXT)"))
    assert all(block.is_utf8 for block in blocks)
    assert not read_block(writer, after, 1 << 40, 2000).is_utf8
    assert not read_block(writer, after, 1 << 40, 2000, {1}).text
