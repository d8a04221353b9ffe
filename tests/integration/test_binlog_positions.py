"""Where MariaDB's binlog is read from after a reconnect: the last transaction that was read."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest

from databus.relay.sources.mysql.mysql_source import MySqlSource
from databus.relay.sources.mysql.protocol.mysql_connection import BinlogRequest, MySqlConnection
from tests.integration.test_least_privileges import USER, statements
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import Streamed, mariadb_config, read_to_end, source_of
from tests.support.opened_source import open_source, opened_scn


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[BinlogRequest]:
    """What is requested of the server."""
    found: list[BinlogRequest] = []
    start = MySqlConnection.start_binlog

    def recorded(connection: MySqlConnection, request: BinlogRequest, *rest: Any) -> socket.socket:
        found.append(request)
        return start(connection, request, *rest)

    monkeypatch.setattr(MySqlConnection, "start_binlog", recorded)
    return found


async def resumed(
    database: FreshDatabase,
    resume_state: str,
    after_scn: int,
    *,
    use_kernels: bool = True,
    url: str = "",
) -> Streamed:
    """What a new fetcher gets that has this resume state."""
    config = mariadb_config(url or database.url, f"{database.name}.*")
    source = await open_source(MySqlSource(config, use_kernels=use_kernels))
    try:
        source.restore(resume_state, None, after_scn)
        return await read_to_end(source, after_scn)
    finally:
        await source.close()


async def first_rows(database: FreshDatabase, *, use_kernels: bool = True) -> Streamed:
    """A table with nine rows, a transaction each, that have been read."""
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    source = source_of(database, use_kernels=use_kernels)
    await source.open()
    try:
        start = await source.first_scn()
        for number in range(9):
            database.execute(f"INSERT INTO t VALUES ({number}, {number})")
        return await read_to_end(source, start)
    finally:
        await source.close()


def begins_at(database: FreshDatabase, file: str, offset: int) -> str:
    rows = database.execute(f"SHOW BINLOG EVENTS IN '{file}' FROM {offset} LIMIT 1")
    return str(rows[0][5])


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernel", "python decoder"])
async def test_the_binlog_is_read_from_the_last_transaction_and_not_from_its_file_s_beginning(
    mariadb_database: FreshDatabase, requests: list[BinlogRequest], use_kernels: bool
) -> None:
    database = mariadb_database
    seen = await first_rows(database, use_kernels=use_kernels)
    for number in range(3):
        database.execute(f"UPDATE t SET v = -1 WHERE id = {number}")
        requests.clear()
        found = await resumed(database, seen.resume_state, seen.resolved, use_kernels=use_kernels)
        assert [event.key["id"] for event in found.events()] == [number]
        (request,) = requests
        assert begins_at(database, request.file, request.offset).endswith(f"-{seen.resolved}")
        seen = found


async def test_the_least_rights_are_enough_to_read_a_binlog_position(
    mariadb_database: FreshDatabase, requests: list[BinlogRequest]
) -> None:
    database = mariadb_database
    seen = await first_rows(database)
    database.execute(f"DROP USER IF EXISTS {USER}")
    for statement in statements("mariadb", database.name):
        database.execute(statement.replace("orders", "t"))
    try:
        database.execute("UPDATE t SET v = -1 WHERE id = 5")
        requests.clear()
        url = re.sub(r"//[^@]*@", f"//{USER}:secret@", database.url)
        found = await resumed(database, seen.resume_state, seen.resolved, url=url)
    finally:
        database.execute(f"DROP USER {USER}")
    assert [event.key["id"] for event in found.events()] == [5]
    assert requests[0].offset > 4


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 4},
        {"offset": 200_000_000},
        {"offset": 333},
        {"file": "binlog.999999"},
        {"server_id": 77},
        {"back": 1},
    ],
    ids=lambda change: next(iter(change)) + str(next(iter(change.values()))),
)
async def test_a_location_that_the_server_does_not_have_is_not_used(
    mariadb_database: FreshDatabase, requests: list[BinlogRequest], change: dict[str, Any]
) -> None:
    """It is another server, or was restored: then from the beginning of a file."""
    database = mariadb_database
    seen = await first_rows(database)
    resume_state = json.loads(seen.resume_state)
    scn, server_id, file, offset = resume_state["place"]
    fields = {"scn": scn, "server_id": server_id, "file": file, "offset": offset} | change
    fields["scn"] -= fields.pop("back", 0)
    resume_state["place"] = list(fields.values())
    database.execute("UPDATE t SET v = -1 WHERE id = 5")
    requests.clear()
    found = await resumed(database, json.dumps(resume_state), seen.resolved)
    assert [event.key["id"] for event in found.events()] == [5]
    assert [request.offset for request in requests] == [4]


async def test_an_open_xa_transaction_is_read_from_where_it_was_prepared(
    mariadb_database: FreshDatabase, requests: list[BinlogRequest]
) -> None:
    database = mariadb_database
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    source = source_of(database)
    start = await opened_scn(source)
    xid = f"'{database.name}'"
    with database.session() as cursor:
        for statement in (
            f"XA START {xid}",
            "INSERT INTO t VALUES (1, 1)",
            f"XA END {xid}",
            f"XA PREPARE {xid}",
        ):
            cursor.execute(statement)
    for number in range(2, 5):
        database.execute(f"INSERT INTO t VALUES ({number}, 1)")
    seen = await read_to_end(source, start)
    await source.close()
    database.execute(f"XA COMMIT {xid}")
    requests.clear()
    found = await resumed(database, seen.resume_state, seen.resolved)
    assert [event.key["id"] for event in found.events()] == [1]
    assert [request.offset for request in requests] == [4]
