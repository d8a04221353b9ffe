"""``databus inspect binlog``: a ring beside its binlog as another library reads it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_format import DATA_OFFSET, RING_NAME
from tests.support.capture import capturing, database_config, ring_state, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.gtids import run_elsewhere, run_under
from tests.support.mysql_server import MySQLServer, require
from tests.support.own_servers import mariadb, mysql  # noqa: F401  fixtures
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.* is deprecated, use:DeprecationWarning"),
]


@pytest.fixture(params=["mariadb", "mysql"])
def database(request: pytest.FixtureRequest) -> FreshDatabase:
    found: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    return found


def write(database: FreshDatabase) -> None:
    database.execute(
        "CREATE TABLE t (id INT, w VARBINARY(5), v VARCHAR(20), f DOUBLE, d DATE, "
        "e ENUM('x', 'y'), PRIMARY KEY (id, w))"
    )
    database.execute("CREATE TABLE aside (id INT PRIMARY KEY)")
    database.execute("INSERT INTO t VALUES (0, '', NULL, NULL, NULL, NULL)")
    database.transaction(
        "INSERT INTO t VALUES (1, 'a', 'one', 1.5, '2026-11-24', 'x')",
        "INSERT INTO t VALUES (2, 'b', 'two', 2, NULL, 'y')",
        "INSERT INTO aside VALUES (1)",
        "UPDATE t SET v = 'zwei' WHERE id = 2",
        "UPDATE t SET id = 3 WHERE id = 1",
    )
    database.execute("INSERT INTO aside VALUES (2)")
    database.execute("DELETE FROM t WHERE id = 3")
    database.execute("TRUNCATE t")
    database.execute("INSERT INTO t VALUES (9, 'z', 'end', 0, NULL, NULL)")


async def captured(database: FreshDatabase, data_dir: Path, name: str = "shop") -> Path:
    """The configuration of a relay that has captured what ``write`` writes, and has ended."""
    async with capturing(
        database_config(name, database.url, f"{database.name}.t"), data_dir
    ) as fetcher:
        await streaming(fetcher)
        await asyncio.to_thread(write, database)
        source = f"{database.name}.t"
        await eventually(
            lambda: list(ring_state(fetcher.folder.path).tables.get(source, ())) == [(9, b"z")], 30
        )
    config = data_dir / "databus.toml"
    config.write_text(
        f'[relay]\ndata_dir = "{data_dir}"\n'
        f'[[database]]\nname = "{name}"\nurl = "{database.url}"\nsources = ["{source}"]\n'
    )
    return config


def inspected(databus: Any, config: Path, *options: str) -> Any:
    return databus("inspect", "binlog", "shop", "-c", config, *options)


def test_a_ring_that_was_captured_equals_what_the_other_library_reads(
    database: FreshDatabase, databus: Any, tmp_path: Path
) -> None:
    config = asyncio.run(captured(database, tmp_path))
    done = inspected(databus, config, "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    # It begins behind the ring's first window, that of CREATE TABLE.
    assert (document["transactions"], document["rows"], document["differences"]) == (5, 8, 0)
    assert document["values"] > document["values_not_compared"] > 0  # of type DOUBLE
    assert document["transactions_not_compared"] == {}


def test_groups_of_another_domain_that_the_server_has_purged_are_not_needed(
    mariadb_database: FreshDatabase, databus: Any, tmp_path: Path
) -> None:
    database = mariadb_database
    run_elsewhere(database, "CREATE TABLE elsewhere (id INT PRIMARY KEY)")
    for _ in range(2):
        database.execute("FLUSH BINARY LOGS")
    last = database.execute("SHOW BINARY LOGS")[-1][0]
    database.execute(f"PURGE BINARY LOGS TO '{last}'")
    config = asyncio.run(captured(database, tmp_path))
    assert (done := inspected(databus, config)).code == 0, done.err


@pytest.mark.parametrize(
    ("damaged", "named"),
    [
        (
            lambda folder: _replace_in_ring(folder, b"zwei", b"ZWEI"),
            "v is 'ZWEI' in the ring, 'zwei' in the binlog",
        ),
        (
            lambda folder: _without_window(folder, 2),
            "the ring has no window, the binlog 1 rows of",
        ),
    ],
    ids=["rows", "windows"],
)
def test_what_differs_or_is_missing_is_named_and_the_exit_code_is_1(
    database: FreshDatabase,
    databus: Any,
    tmp_path: Path,
    damaged: Callable[[Path], None],
    named: str,
) -> None:
    config = asyncio.run(captured(database, tmp_path))
    damaged(tmp_path / "shop")
    done = inspected(databus, config)
    assert done.code == 1
    assert named in done.err


def test_a_range_and_what_the_library_does_not_read(
    mysql_database: FreshDatabase, databus: Any, tmp_path: Path
) -> None:
    require(mysql_database.server, "compressed transactions", 8, 0)

    async def with_a_compressed_one() -> Path:
        config = await captured(mysql_database, tmp_path)
        async with capturing(
            database_config("shop", mysql_database.url, f"{mysql_database.name}.t"), tmp_path
        ) as fetcher:
            await streaming(fetcher)
            compressed = "SET binlog_transaction_compression = ON"
            insert = "INSERT INTO t (id, w) VALUES (10, 'k')"
            await asyncio.to_thread(run_under, mysql_database, "AUTOMATIC", compressed, insert)
            await eventually(lambda: ring_state(fetcher.folder.path).letters.endswith("cc"), 30)
        return config

    config = asyncio.run(with_a_compressed_one())
    scns = [scn for scn, _, _ in ring_state(tmp_path / "shop").windows]
    document = json.loads(inspected(databus, config, "--json").out)
    unread = "an event of type 40, which is compressed"
    assert document["transactions_not_compared"] == {unread: 1}
    options = ("--after", str(scns[1]), "--upto", str(scns[2]), "--json")
    document = json.loads(inspected(databus, config, *options).out)
    assert (document["transactions"], document["rows"], document["differences"]) == (1, 1, 0)


def test_a_server_with_tagged_gtids_is_refused_in_one_line(
    mysql_database: FreshDatabase, databus: Any, tmp_path: Path
) -> None:
    require(mysql_database.server, "tags of GTIDs", 8, 3)
    with MySQLServer(tmp_path / "tagged") as server:
        server.create_database("shop")
        database = FreshDatabase(server, "shop")
        config = asyncio.run(captured(database, tmp_path))
        run_under(database, "AUTOMATIC:tag", "CREATE TABLE tagged (id INT)")
        done = inspected(databus, config)
    assert done.code != 0 and "does not read tagged GTIDs" in done.err


def test_a_database_without_a_binlog_is_refused(databus: Any, tmp_path: Path) -> None:
    config = tmp_path / "databus.toml"
    config.write_text('[relay]\n[[database]]\nname = "shop"\nurl = "generator://"\n')
    done = inspected(databus, config)
    assert done.code != 0 and "has no binlog" in done.err


def _replace_in_ring(folder: Path, old: bytes, new: bytes) -> None:
    """Change bytes of a frame, and its CRC with them."""
    ring = folder / RING_NAME
    data = bytearray(ring.read_bytes())
    with Ring.open_reader(folder) as reader:
        state = reader.snapshot()
        frames, _ = reader.read(state.head, 1 << 30)
        frames = bytearray(frames)
    at = 0
    for view in frame_format.iter_frames(bytes(frames)):
        size = int.from_bytes(frames[at + 4 : at + 8], "little")
        frame = bytes(frames[at : at + size])
        if old in frame and view.op == Op.UPDATE:
            changed = frame.replace(old, new)
            data[DATA_OFFSET + at : DATA_OFFSET + at + size] = sealed(changed)
        at += size
    ring.write_bytes(data)


def sealed(frame: bytes) -> bytes:
    return google_crc32c.value(frame[4:]).to_bytes(4, "little") + frame[4:]


def _without_window(folder: Path, number: int) -> None:
    """Make the ring again without its window of this number."""
    with Ring.open_reader(folder) as reader:
        state = reader.snapshot()
        frames, _ = reader.read(state.head, 1 << 30)
        frames, clock, start = bytes(frames), reader.clock, state.prev
    windows, begin, at = list[tuple[bytes, int]](), 0, 0
    for view in frame_format.iter_frames(frames):
        at += int.from_bytes(frames[at + 4 : at + 8], "little")
        if view.op == Op.END_OF_WINDOW:
            windows.append((frames[begin:at], view.event_count))
            begin = at
    of_source = [window for window, count in windows if count]
    for name in (RING_NAME, "ring.index"):
        (folder / name).unlink()
    again = folder.with_name("again")
    with Ring.create(again, 1 << 20, clock=clock, start=start) as writer:
        for window, _ in windows:
            if window is not of_source[number]:
                writer.append(window)
    for name in (RING_NAME, "ring.index"):
        shutil.move(again / name, folder / name)
