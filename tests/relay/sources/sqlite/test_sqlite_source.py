"""SQLite as a source, on real database files written by ordinary connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.errors import (
    ConfigError,
    PreflightFailed,
    SourcePositionLost,
    SourceUnavailable,
)
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.sqlite import sqlite_log
from databus.relay.sources.sqlite.sqlite_source import SqliteSource
from tests.support.opened_source import open_source
from tests.support.sqlite_source import TABLES, Reader, batches_until, config, read


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("retained_rows", "did you mean retain_rows?"),
        ("pol_ms", "did you mean poll_ms?"),
        ("slot", "known are poll_ms, retain_rows, recursive_triggers"),
        ("block", "known are poll_ms, retain_rows, recursive_triggers"),
    ],
)
def test_an_unknown_option_is_refused_with_the_right_name(
    path: Path, option: str, advice: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SqliteSource(config(path, **{option: 0}))
    assert caught.value.message == f"database shop: unknown option {option!r}; {advice}"


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
    assert frame_format.scan(first.data).op.tolist().count(Op.END_OF_WINDOW) == 0
    writer.execute("INSERT INTO item (id) VALUES (100000)")
    await source.close()
    again = await open_source(SqliteSource(config(path)))
    reader = Reader(again, 0)
    await reader.until(9002)
    await again.close()
    ends = [view for view in reader.frames if view.op == Op.END_OF_WINDOW]
    assert [(end.scn, end.event_count) for end in ends] == [(9001, 9000), (9002, 1)]
    assert b"".join(bytes(view.bytes) for view in reader.frames).startswith(first.data)


async def test_a_suspension_in_a_large_window_is_found_at_the_same_position_after_a_restart(
    path: Path, source: SqliteSource, writer: sqlite3.Connection
) -> None:
    writer.execute("BEGIN")
    for number in range(4500):
        writer.execute("INSERT INTO line VALUES (1, ?, ?)", (f"{number}", number))
        if number == 3000:
            writer.execute("INSERT INTO line VALUES (1, 'x', 'many')")
        if number % 3 == 0:
            writer.execute("INSERT INTO item (name) VALUES ('y')")
    writer.execute("COMMIT")
    end = await source.first_scn()
    batches = await batches_until(source, 0, end)
    first = b"".join(batch.data for batch in batches)
    persisted = [at for at, batch in enumerate(batches) if batch.persist_first]
    assert len(persisted) == 1 and persisted[0] < len(batches) - 1, (
        "the suspension is stored before the end"
    )
    assert len(frame_format.scan(first)) == 3001 + 1500 + 1
    resume_state = batches[-1].resume_state
    assert resume_state is not None and '"main.line": [6002,' in resume_state.encode()
    writer.execute("INSERT INTO line VALUES (2, 'z', 1)")
    writer.execute("INSERT INTO item (name) VALUES ('z')")
    await source.close()
    again = SqliteSource(config(path))
    again.restore(resume_state.encode(), None, 0)
    await again.open()
    assert first == b"".join(batch.data for batch in await batches_until(again, 0, end))
    await again.close()
    after = SqliteSource(config(path))
    after.restore(resume_state.encode(), None, end)
    await after.open()
    assert [event[:2] for event in await read(after, end)] == [("c", "main.item")]
    await after.close()


@pytest.mark.parametrize("away", [True, False])
async def test_a_rebuilt_table_is_suspended_alone_because_its_triggers_were_gone(
    path: Path, writer: sqlite3.Connection, away: bool
) -> None:
    source = SqliteSource(config(path))
    source.restore("", None, 1)
    await source.open()
    writer.execute("INSERT INTO item (id) VALUES (1)")
    writer.execute("INSERT INTO line VALUES (1, 'a', 1)")
    batches = await batches_until(source, 1, 3)
    stream = source.stream(3)
    await anext(stream)
    if away:
        await source.close()
    # As SQLite has tables altered whose columns cannot be, and then written to at once.
    writer.executescript(
        "BEGIN; CREATE TABLE new (shop INT, code TEXT, qty INT, PRIMARY KEY (shop, code));"
        "INSERT INTO new SELECT * FROM line; DROP TABLE line; ALTER TABLE new RENAME TO line;"
        "COMMIT; INSERT INTO line VALUES (2, 'b', 2); INSERT INTO item (id) VALUES (2);"
    )
    if away:
        resume_state = batches[-1].resume_state
        assert resume_state is not None
        source = SqliteSource(config(path))
        source.restore(resume_state.encode(), None, 3)
        await source.open()
        stream = source.stream(3)
    found = [await anext(stream)]
    while found[-1].resolved < 4:
        found.append(await anext(stream))
    persisted = [batch.resume_state for batch in found if batch.persist_first]
    assert persisted[0] is not None and '"main.line": [3,' in persisted[0].encode()
    writer.execute("INSERT INTO line VALUES (3, 'c', 3)")
    writer.execute("INSERT INTO item (id) VALUES (3)")
    end = await source.first_scn()
    while found[-1].resolved < end:
        found.append(await anext(stream))
    data = b"".join(batch.data for batch in found)
    assert frame_format.scan(data).op.tolist().count(Op.INSERT) == 2, "those of the other table"
    assert "no triggers" in (await source.status())["warnings"][0]
    # A request is carried out with the new definition.
    reading = asyncio.ensure_future(source.read_chunk(ChunkRequest("main.line", limit=10)))
    while not reading.done():
        found.append(await anext(stream))
    assert len((await reading).rows) == 3
    writer.execute("UPDATE line SET qty = 5 WHERE shop = 3")
    end = await source.first_scn()
    found = [await anext(stream)]
    while found[-1].resolved < end:
        found.append(await anext(stream))
    assert Op.UPDATE in frame_format.scan(b"".join(batch.data for batch in found)).op.tolist()
    await stream.aclose()
    await source.close()


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
        rows = [data for data in whole if frame_format.read_frame(data).op != Op.END_OF_WINDOW]
        assert [frame_format.read_frame(data).key for data in found] == [
            frame_format.read_frame(data).key for data in rows[after:]
        ]


async def test_a_pruned_or_shortened_log_is_named_and_never_skipped(
    path: Path, writer: sqlite3.Connection
) -> None:
    source = await open_source(SqliteSource(config(path)))
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


async def test_a_log_that_cannot_be_pruned_now_blocks_no_writer(
    path: Path, writer: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_log, "connect", functools.partial(sqlite_log.connect, busy_ms=1))
    writer.execute("PRAGMA journal_mode = DELETE")
    source = await open_source(SqliteSource(config(path)))
    writer.execute("BEGIN")
    for number in range(6000):
        writer.execute("INSERT INTO item (id) VALUES (?)", (number,))
    writer.execute("COMMIT")
    with contextlib.closing(sqlite3.connect(path)) as reader:
        reading = reader.execute("SELECT id FROM item")
        assert reading.fetchone() == (0,)
        monkeypatch.setattr(sqlite_log, "BUSY_MS", 200)
        with pytest.raises(SourceUnavailable, match="database is locked"):
            await source.ack(5501)  # Its commit has to wait for the reader.
        reading.close()
    monkeypatch.setattr(sqlite_log, "BUSY_MS", 10_000)
    writer.execute("INSERT INTO item (id) VALUES (6000)")
    await source.ack(5501)
    assert writer.execute("SELECT min(id) FROM databus_log").fetchone() == (5502,)
    await source.close()


async def test_a_closed_source_can_be_queried_again(path: Path) -> None:
    source = await open_source(SqliteSource(config(path)))
    await source.close()
    with pytest.raises(SourceUnavailable, match="was closed"):
        await source.read_chunk(ChunkRequest("main.item", 10))


async def test_the_clock_is_the_files_own(path: Path, tmp_path: Path, source: SqliteSource) -> None:
    other_path = tmp_path / "other.db"
    with sqlite3.connect(other_path) as connection:
        connection.executescript(TABLES)
    connection.close()
    other, same = SqliteSource(config(other_path)), SqliteSource(config(path))
    await other.open()
    await source.close()
    await same.open()
    assert same.clock == source.clock != other.clock
    await other.close()
    await same.close()


async def test_tables_left_out_are_not_logged_at_all(
    path: Path, writer: sqlite3.Connection
) -> None:
    source = await open_source(SqliteSource(config(path, "main.item")))
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


async def test_a_virtual_table_is_named_and_its_shadow_tables_have_no_triggers(
    path: Path, writer: sqlite3.Connection
) -> None:
    writer.execute("CREATE VIRTUAL TABLE words USING fts5(a)")
    source = SqliteSource(config(path))
    (finding,) = await source.preflight()
    assert (finding.table, finding.fatal) == ("main.words", False)
    await source.open()
    reader = Reader(source, 0)
    writer.execute("INSERT INTO words VALUES ('a word to find')")
    writer.execute("CREATE VIRTUAL TABLE more USING fts5(a)")
    writer.execute("INSERT INTO more VALUES ('another word')")
    writer.execute("INSERT INTO item (id) VALUES (1)")
    found = await reader.until(await source.first_scn())
    assert [(op, table) for op, table, *_ in found] == [("c", "main.item")]
    status = await source.status()
    assert status["tables"] == ["item", "line"]
    assert [one.partition(":")[0] for one in status["warnings"]] == [
        "main.words cannot be captured",
        "main.more cannot be captured",
    ][::-1]
    assert status["stopped_tables"] == {}
    await source.close()


async def test_a_status_examines_the_tables_only_after_a_change_of_a_definition(
    source: SqliteSource, writer: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined: list[str] = []

    def counted(connection: sqlite3.Connection, table: str, *keys: Any) -> Any:
        examined.append(table)
        return table_schema(connection, table, *keys)

    table_schema = sqlite_log.table_schema
    await source.status()
    monkeypatch.setattr(sqlite_log, "table_schema", counted)
    writer.execute("INSERT INTO item (id) VALUES (1)")
    status = await source.status()
    assert (status["tables"], status["log_rows"], examined) == (["item", "line"], 1, [])
    writer.execute("CREATE TABLE plain (a INT)")
    assert "main.plain" in str((await source.status())["warnings"])
    assert "plain" in examined


@pytest.mark.parametrize("use_kernel", [True, False])
@pytest.mark.parametrize(
    ("values", "why"),
    [
        ("1, 'b', 'many'", r"main\.line\.qty .*typeof\(\"qty\"\) = 'text' finds.*STRICT"),
        ("1, CAST(x'62ff' AS TEXT), 1", "text in column 'code' is not UTF-8"),
        ("1, NULL, 1", r"main\.line\.code .*of type null"),
    ],
)
async def test_a_value_of_another_type_suspends_its_table_alone_and_is_not_delivered(
    path: Path, writer: sqlite3.Connection, use_kernel: bool, values: str, why: str
) -> None:
    writer.execute("DROP TABLE line")
    # SQLite takes null in such a key.
    writer.execute("CREATE TABLE line (shop INT, code TEXT, qty INT, PRIMARY KEY (shop, code))")
    source = await open_source(SqliteSource(config(path), use_kernel=use_kernel))
    reader = Reader(source, 0)
    for number in range(2):
        writer.execute("BEGIN")
        writer.execute(f"INSERT INTO line VALUES ({number}, 'a', 1)")
        writer.execute(f"INSERT INTO line VALUES ({values})" if number else "SELECT 1")
        writer.execute(f"INSERT INTO line VALUES ({number}, 'c', 1)")
        writer.execute(f"INSERT INTO item (id) VALUES ({number})")
        writer.execute("COMMIT")
        found = await reader.until(await source.first_scn())
    writer.execute("UPDATE line SET qty = 2 WHERE code = 'c'")
    writer.execute("UPDATE item SET name = 'x'")
    found = await reader.until(await source.first_scn())
    assert [(op, table, tuple(key.values())) for op, table, key, *_ in found] == [
        ("c", "main.line", (0, "a")),
        ("c", "main.line", (0, "c")),
        ("c", "main.item", (0,)),
        ("c", "main.line", (1, "a")),
        ("c", "main.item", (1,)),
        ("u", "main.item", (0,)),
        ("u", "main.item", (1,)),
    ]
    status = await source.status()
    assert re.search(why, status["stopped_tables"]["main.line"]["why"])
    assert "many" not in str(status)
    await source.close()


async def test_a_database_in_another_encoding_is_read(tmp_path: Path) -> None:
    path = tmp_path / "wide.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA encoding = 'UTF-16le'")
        writer.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
        source = await open_source(SqliteSource(config(path)))
        writer.execute("INSERT INTO t VALUES (1, 'hé😀')")
        assert [event[-1] for event in await read(source)] == [{"id": 1, "v": "hé😀"}]
        writer.execute("ALTER TABLE t ADD COLUMN w TEXT")
        writer.execute("UPDATE t SET w = 'ü'")
        assert (await read(source))[-1][-1] == {"id": 1, "v": "hé😀", "w": "ü"}
        await source.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite://file"])
def test_a_url_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="sqlite:///relative/file"):
        SqliteSource(DatabaseConfig(name="shop", url=SourceUrl(url)))


async def test_a_missing_file_is_named(tmp_path: Path) -> None:
    source = SqliteSource(config(tmp_path / "none.db"))
    with pytest.raises(SourceUnavailable, match=r"none\.db"):
        await source.open()
    await source.close()
