"""Dates that no calendar has, of MariaDB and MySQL, carried as text: one check for both."""

from __future__ import annotations

import pytest

from databus.common.compiled.kernels import COMPILED
from databus.common.schema.source_schema import Kind
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql.chunks import mysql_chunks
from databus.relay.sources.mysql.tables.mapped_table import MappedTable
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import mariadb_config, read_to_end

_DATES = ["0000-00-00", "2020-00-00", "2020-02-00", "2020-02-31", "1000-01-01", "2024-02-29"]
_FORMS = {
    0: ("0000-00-00 00:00:00", "2020-00-01 00:00:00", "2024-02-29 23:59:58"),
    1: ("0000-00-00 00:00:00.0", "2020-00-01 00:00:00.5", "2020-02-30 01:02:03.0"),
    3: ("0000-00-00 00:00:00.000", "0000-01-00 10:20:30.007", "2024-02-29 23:59:59.999"),
    6: ("0000-00-00 00:00:00.000000", "2020-02-00 00:00:00.000001", "9999-12-31 23:59:59.999999"),
}
_MOMENTS = {
    0: ("0000-00-00 00:00:00", "1970-01-01 00:00:01", "2024-02-29 23:59:58", "2038-01-19 03:14:07"),
    2: ("0000-00-00 00:00:00.00", "2000-03-01 12:00:00.05", "1999-12-31 00:00:00.00"),
    6: ("0000-00-00 00:00:00.000000", "2000-02-29 12:00:00.000001", "1970-03-01 00:00:00.999999"),
}
AS_TEXT: dict[str, list[str]] = {
    "date": _DATES,
    **{f"datetime({digits})": list(texts) for digits, texts in _FORMS.items()},
    **{f"timestamp({digits})": list(texts) for digits, texts in _MOMENTS.items()},
}
"""The texts of values, by type: what is inserted and what consumers see."""


async def check_zero_dates_as_text(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``zero_dates = "text"`` rows and keys hold the server's text, however they are read."""
    for number, type_name in enumerate(AS_TEXT):
        database.transaction(
            "SET sql_mode='', time_zone='+00:00'",
            # The key and the value; another key column, for chunks that end in between.
            f"CREATE TABLE t{number} (k {type_name} NOT NULL DEFAULT 0, n INT, "
            f"v {type_name} NULL, PRIMARY KEY (k, n))",
        )
    source = MySqlSource(
        mariadb_config(database.url, f"{database.name}.*", options={"zero_dates": "text"})
    )
    await source.open()
    try:
        start = await source.first_scn()
        database.transaction(
            "SET sql_mode='ALLOW_INVALID_DATES', time_zone='+00:00'",
            *(
                f"INSERT INTO t{number} VALUES "
                + ", ".join(f"('{text}', {n}, '{text}')" for text in texts for n in (1, 2))
                for number, texts in enumerate(AS_TEXT.values())
            ),
            "UPDATE t0 SET v = NULL WHERE k = '2020-02-00' AND n = 2",
            "UPDATE t0 SET n = 3 WHERE k = '0000-00-00' AND n = 2",
            "DELETE FROM t0 WHERE k = '2020-00-00' AND n = 2",
        )
        with monkeypatch.context() as patch:
            if COMPILED:
                patch.delattr(MappedTable, "rows")  # The kernel leaves none of them to Python.
            streamed = await read_to_end(source, start)
        source.use_kernels = False
        slowly = await read_to_end(source, start)
        assert bytes(slowly.data) == bytes(streamed.data)
        tables = streamed.tables()
        by_source = {schema.source: schema for schema in streamed.schemas}
        for number, (type_name, texts) in enumerate(AS_TEXT.items()):
            name = f"{database.name}.t{number}"
            expected: dict[tuple[str, int], tuple[str, int, str | None]]
            expected = {(text, n): (text, n, text) for text in texts for n in (1, 2)}
            if type_name == "date":
                expected["2020-02-00", 2] = ("2020-02-00", 2, None)
                expected["0000-00-00", 3] = ("0000-00-00", 3, "0000-00-00")
                del expected["0000-00-00", 2], expected["2020-00-00", 2]
            schema, rows = by_source[name], tables[name]
            assert {tuple(row.values()) for row in rows.values()} == set(expected.values())
            assert {tuple(schema.decode_key(key).values()) for key in rows} == set(expected)
            for column in (schema.columns[0], schema.columns[2]):
                assert column.kind is Kind.STRING
                assert column.type_name == type_name.replace("(0)", "")
            for compiled in {False, COMPILED}:
                with monkeypatch.context() as patch:
                    patch.setattr(mysql_chunks, "COMPILED", compiled)
                    dumped = await _paged(source, name, len(expected) + 1)
                assert dumped == {key: schema.encode_row(row) for key, row in rows.items()}
            chunk = await source.read_chunk(
                ChunkRequest(name, 10, keys=[[texts[0], 1], [texts[1], 7]])
            )
            assert (len(chunk.rows), chunk.missing) == (1, [[texts[1], 7]])
    finally:
        await source.close()


async def _paged(source: MySqlSource, name: str, most_pages: int) -> dict[bytes, bytes]:
    """A table's rows by key, each read by a chunk of its own."""
    upto = await source.largest_key(name)
    rows, after = dict[bytes, bytes](), None
    for _ in range(most_pages):
        chunk = await source.read_chunk(ChunkRequest(name, 1, after=after, upto=upto))
        rows |= {row.key: row.row for row in chunk.rows}
        after = chunk.last_key
        if chunk.done:
            return rows
    raise AssertionError(f"{name} does not end after {most_pages} chunks of one row: {after}")
