"""SQLite as a source, on real database files written by ordinary connections."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from databus.common import frame
from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.errors import (
    ConfigError,
    PreflightFailed,
    SourcePositionLost,
    SourceUnavailable,
    UnsupportedChange,
)
from databus.common.frame import OP_LETTERS, FrameView, Op
from databus.common.schema import SchemaSet
from databus.relay.sources import sqlite_log as log
from databus.relay.sources.source import ChunkRequest
from databus.relay.sources.sqlite import SqliteSource
from databus.relay.sources.sqlite_pack import read_block

TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL, photo BLOB, tax DECIMAL(9,2));
CREATE TABLE line (shop INT NOT NULL, code TEXT NOT NULL, qty INT, PRIMARY KEY (shop, code));
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "shop.db"
    with sqlite3.connect(file) as connection:
        connection.executescript(TABLES)
    connection.close()
    return file


@pytest.fixture
def writer(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None)
    yield connection
    connection.close()


def config(path: Path, *sources: str, **options: Any) -> DatabaseConfig:
    return DatabaseConfig(
        name="shop",
        url=SourceUrl(f"sqlite:///{path}"),
        sources=sources or ("main.*",),
        options=options,
    )


@pytest.fixture
async def source(path: Path) -> AsyncIterator[SqliteSource]:
    opened = SqliteSource(config(path))
    await opened.open()
    yield opened
    await opened.close()


class Reader:
    """Reads a source's stream as a consumer would see it."""

    def __init__(self, source: SqliteSource, after: int) -> None:
        self.schemas = SchemaSet()
        self.frames: list[FrameView] = []
        self._batches = source.stream(after)

    async def until(self, scn: int) -> list[tuple[Any, ...]]:
        """Everything up to ``scn``: (op, source, key, before, after) of each event."""
        async for batch in self._batches:
            for schema in batch.schemas:
                self.schemas.add(schema)
            self.frames += frame.iter_frames(batch.data)
            if batch.resolved >= scn:
                break
        return [self._event(view) for view in self.frames if not view.is_control]

    def _event(self, view: FrameView) -> tuple[Any, ...]:
        schema = self.schemas.by_fingerprint(view.schema_fp)
        rows = [
            None if part is None else schema.decode_row(part) for part in (view.before, view.after)
        ]
        return (OP_LETTERS[view.op], schema.source, schema.decode_key(view.key), *rows)


async def read(source: SqliteSource, after: int = 0) -> list[tuple[Any, ...]]:
    return await Reader(source, after).until(await source.first_scn())


async def test_changes_come_exactly_with_both_images(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    writer.execute("INSERT INTO item VALUES (1, 'é\n''\"', 0.1, x'00ff', 1.10)")
    writer.execute("UPDATE item SET price = 1e300, photo = NULL WHERE id = 1")
    writer.execute("DELETE FROM item")
    first = {"id": 1, "name": "é\n'\"", "price": 0.1, "photo": b"\x00\xff", "tax": Decimal("1.1")}
    second = first | {"price": 1e300, "photo": None}
    assert await read(source) == [
        ("c", "main.item", {"id": 1}, None, first),
        ("u", "main.item", {"id": 1}, first, second),
        ("d", "main.item", {"id": 1}, second, None),
    ]


async def test_integers_and_floats_keep_every_bit(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    numbers = [-(2**63), 2**63 - 1, 2**53 + 1]
    floats = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, float("inf"), 123456789.123456789]
    for number in numbers:
        writer.execute("INSERT INTO item (id) VALUES (?)", (number,))
    for at, value in enumerate(floats):
        writer.execute("INSERT INTO item (id, price) VALUES (?, ?)", (at + 1, value))
    events = await read(source)
    assert [event[2]["id"] for event in events[:3]] == numbers
    assert [event[4]["price"] for event in events[3:]] == floats


async def test_a_key_that_changes_is_a_delete_and_an_insert_of_one_window(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    writer.execute("INSERT INTO line VALUES (1, 'a', 5)")
    reader = Reader(source, 0)
    await reader.until(await source.first_scn())
    writer.execute("UPDATE line SET code = 'b'")
    events = await reader.until(await source.first_scn())
    assert [event[0] for event in events] == ["c", "d", "c"]
    assert [event[2]["code"] for event in events] == ["a", "a", "b"]
    assert [(view.seq, view.op) for view in reader.frames[2:]] == [(0, 3), (1, 1), (2, 64)]


async def test_what_is_rolled_back_never_comes(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    writer.execute("BEGIN")
    writer.execute("INSERT INTO item (id) VALUES (1)")
    writer.execute("SAVEPOINT s")
    writer.execute("INSERT INTO item (id) VALUES (2)")
    writer.execute("ROLLBACK TO s")
    writer.execute("INSERT INTO item (id) VALUES (3)")
    writer.execute("COMMIT")
    writer.execute("BEGIN")
    writer.execute("DELETE FROM item")
    writer.execute("ROLLBACK")
    assert [(event[0], event[2]["id"]) for event in await read(source)] == [("c", 1), ("c", 3)]


async def test_a_transaction_of_several_tables_is_one_window(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    writer.execute("BEGIN")
    writer.execute("INSERT INTO item (id) VALUES (1)")
    writer.execute("INSERT INTO line VALUES (1, 'a', 5)")
    writer.execute("COMMIT")
    reader = Reader(source, 0)
    await reader.until(await source.first_scn())
    assert [view.op for view in reader.frames] == [Op.INSERT, Op.INSERT, Op.END_OF_WINDOW]
    assert {view.scn for view in reader.frames} == {3}


async def test_a_large_window_is_cut_the_same_way_after_a_restart(
    path: Path, source: SqliteSource, writer: sqlite3.Connection
) -> None:
    writer.execute("BEGIN")
    for number in range(9000):
        writer.execute("INSERT INTO item (id, name) VALUES (?, ?)", (number, "x" * 300))
    writer.execute("COMMIT")
    batches = source.stream(0)
    first = await anext(batches)
    assert frame.scan(first.data).op.tolist().count(Op.END_OF_WINDOW) == 0
    writer.execute("INSERT INTO item (id) VALUES (100000)")
    again = SqliteSource(config(path))
    await again.open()
    reader = Reader(again, 0)
    await reader.until(9002)
    await again.close()
    ends = [view for view in reader.frames if view.op == Op.END_OF_WINDOW]
    assert [(end.scn, end.event_count) for end in ends] == [(9001, 9000), (9002, 1)]
    assert b"".join(bytes(view.bytes) for view in reader.frames).startswith(first.data)


async def test_a_column_that_is_added_comes_with_a_schema_change(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    reader = Reader(source, 0)
    writer.execute("INSERT INTO line VALUES (1, 'a', 5)")
    await reader.until(await source.first_scn())
    writer.execute("ALTER TABLE line ADD COLUMN note TEXT")
    writer.execute("INSERT INTO line VALUES (1, 'b', 6, 'fresh')")
    deadline = asyncio.get_running_loop().time() + 10
    while not any("note" in (e[4] or {}) for e in await reader.until(await source.first_scn())):
        assert asyncio.get_running_loop().time() < deadline
    writer.execute("UPDATE line SET note = 'new' WHERE code = 'a'")
    events = await reader.until(await source.first_scn())
    latest = {event[2]["code"]: event[4] for event in events}
    assert latest == {
        "a": {"shop": 1, "code": "a", "qty": 5, "note": "new"},
        "b": {"shop": 1, "code": "b", "qty": 6, "note": "fresh"},
    }
    assert [view.op for view in reader.frames].count(Op.SCHEMA_CHANGE) == 1


async def test_a_restart_after_any_scn_gives_the_same_frames(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    reader = Reader(source, 0)
    for number in range(5):
        writer.execute("INSERT INTO item (id) VALUES (?)", (number,))
        await reader.until(number + 2)
    whole = [bytes(view.bytes) for view in reader.frames]
    for after in range(5):
        again = Reader(source, after + 1)
        await again.until(6)
        found = [bytes(view.bytes) for view in again.frames if view.op != Op.END_OF_WINDOW]
        rows = [data for data in whole if frame.read_frame(data).op != Op.END_OF_WINDOW]
        assert [frame.read_frame(data).key for data in found] == [
            frame.read_frame(data).key for data in rows[after:]
        ]


async def test_a_pruned_or_shortened_log_is_named_and_never_skipped(
    path: Path, writer: sqlite3.Connection
) -> None:
    source = SqliteSource(config(path))
    await source.open()
    writer.execute("BEGIN")
    for number in range(6000):
        writer.execute("INSERT INTO item (id) VALUES (?)", (number,))
    writer.execute("COMMIT")
    await source.ack(5501)
    assert writer.execute("SELECT min(id) FROM databus_log").fetchone() == (5502,)
    for wrong in (5500, 6002):
        with pytest.raises(
            SourcePositionLost, match=rf"from 5501 to 6001; the relay is at {wrong}"
        ):
            await anext(source.stream(wrong))
    assert len(await read(source, 5501)) == 500
    await source.close()


async def test_the_clock_is_the_files_own(path: Path, tmp_path: Path, source: SqliteSource) -> None:
    other_path = tmp_path / "other.db"
    with sqlite3.connect(other_path) as connection:
        connection.executescript(TABLES)
    connection.close()
    other, same = SqliteSource(config(other_path)), SqliteSource(config(path))
    await other.open()
    await same.open()
    assert same.clock == source.clock != other.clock
    await other.close()
    await same.close()


async def test_tables_left_out_are_not_logged_at_all(
    path: Path, writer: sqlite3.Connection
) -> None:
    source = SqliteSource(config(path, "main.item"))
    await source.open()
    writer.execute("INSERT INTO line VALUES (1, 'secret', 5)")
    writer.execute("INSERT INTO item (id) VALUES (1)")
    assert [event[1] for event in await read(source)] == ["main.item"]
    assert writer.execute("SELECT count(*) FROM databus_log").fetchone() == (1,)
    await source.close()


async def test_a_table_without_a_key_is_refused_with_the_remedy(
    path: Path, writer: sqlite3.Connection
) -> None:
    writer.execute("CREATE TABLE bare (x)")
    source = SqliteSource(config(path))
    with pytest.raises(PreflightFailed, match=r"key of main\.bare.*PRIMARY KEY"):
        await source.open()
    await source.close()


async def test_a_value_of_another_type_is_named_and_not_bent(
    source: SqliteSource, writer: sqlite3.Connection
) -> None:
    writer.execute("INSERT INTO line VALUES (1, 'a', 'many')")
    with pytest.raises(UnsupportedChange, match=r"main\.line\.qty .*'many'.*STRICT"):
        await read(source)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite://file"])
def test_a_url_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="sqlite:///relative/file"):
        SqliteSource(DatabaseConfig(name="shop", url=SourceUrl(url)))


async def test_a_missing_file_is_named(tmp_path: Path) -> None:
    source = SqliteSource(config(tmp_path / "none.db"))
    with pytest.raises(SourceUnavailable, match=r"none\.db"):
        await source.open()
    await source.close()


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
    chunk = await source.read_chunk(ChunkRequest("main.item", limit=10, where="price < 1"))
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


def test_a_text_that_is_not_utf8_is_named_and_a_large_block_is_read_in_parts(
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
    with pytest.raises(UnsupportedChange, match="not UTF-8"):
        read_block(writer, after, 1 << 40, 2000)
