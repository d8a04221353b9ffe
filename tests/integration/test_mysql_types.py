"""Every MySQL type: the value in the stream, in a dump and in plain SQL is one value."""

from __future__ import annotations

import pytest

from databus.relay.sources.contract import ChunkRequest
from tests.support.fixtures import FreshDatabase, SetRowMetadata
from tests.support.mariadb_stream import opened_on, read_to_end
from tests.support.mysql_types import MYSQL_TYPES, Types, is_in_the_kernel, value_rows
from tests.support.zero_dates import check_zero_dates_as_text


@pytest.mark.parametrize("metadata", ["FULL", "MINIMAL"])
@pytest.mark.parametrize(
    "types",
    [MYSQL_TYPES, [t for t in MYSQL_TYPES if is_in_the_kernel("mysql", t[0])]],
    ids=["python decoder", "kernel"],
)
async def test_all_types_are_equal_in_the_stream_in_a_dump_and_as_inserted(
    mysql_database: FreshDatabase, types: Types, metadata: str, row_metadata: SetRowMetadata
) -> None:
    row_metadata(mysql_database.server, metadata)
    if not mysql_database.server.is_at_least(9):
        types = [one for one in types if not one[0].startswith("vector")]
    columns = ", ".join(f"c{i} {type_}" for i, (type_, _) in enumerate(types))
    mysql_database.execute(f"CREATE TABLE t (id INT PRIMARY KEY, {columns})")
    async with opened_on(mysql_database) as (source, start):
        rows = value_rows(types)
        for number, row in enumerate(rows):
            literals = ", ".join(literal for literal, _ in row)
            mysql_database.execute(
                f"INSERT INTO t VALUES ({number}, {literals})".replace("%", "%%")
            )
        streamed = await read_to_end(source, start)
        chunk = await source.read_chunk(ChunkRequest(f"{mysql_database.name}.t", 100))
        source.use_kernels = False
        slowly = await read_to_end(source, start)
    wanted = [{"id": n} | {f"c{i}": v for i, (_, v) in enumerate(r)} for n, r in enumerate(rows)]
    assert [event.after for event in streamed.events()] == wanted
    assert bytes(slowly.data) == bytes(streamed.data)
    views = [view for view in streamed.frames() if view.after and not view.is_control]
    assert {row.key: row.row for row in chunk.rows} == {
        bytes(view.key): bytes(view.after or b"") for view in views
    }


async def test_a_date_that_is_none_is_carried_as_text_when_so_configured(
    mysql_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_zero_dates_as_text(mysql_database, monkeypatch)
