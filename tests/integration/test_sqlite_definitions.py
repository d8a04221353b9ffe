"""SQLite tables that change while the relay streams, and have no triggers at that moment."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from databus.common.frame import Op, source_id
from databus.relay.registry import RegistryReader
from tests.support.capture import capturing, database_config, streaming
from tests.support.relay_process import ring_frames
from tests.support.waiting import eventually


def rows(data_dir: Path, table: str) -> list[dict[str, object]]:
    """A table as a consumer has it."""
    reader = RegistryReader(data_dir / "shop" / "schemas.jsonl")
    found: dict[bytes, dict[str, object]] = {}
    reader.refresh()
    for view in ring_frames(data_dir / "shop"):
        if view.source_id != source_id(f"main.{table}"):
            continue
        if view.op == Op.TRUNCATE:
            found.clear()
        elif view.after is not None and not view.is_control:
            found[bytes(view.key)] = reader.schemas.by_fingerprint(view.schema_fp).decode_row(
                view.after
            )
    return list(found.values())


async def test_tables_that_appear_with_rows_are_resynchronised(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    config = database_config("shop", f"sqlite:///{path}", "main.*")
    with closing(sqlite3.connect(path, isolation_level=None)) as shop:
        shop.execute("CREATE TABLE old (id INTEGER PRIMARY KEY, c INT)")
        async with capturing(config.model_copy(update={"resync": "auto"}), tmp_path) as fetcher:
            await streaming(fetcher)
            shop.execute("INSERT INTO old VALUES (1, 1)")
            await eventually(lambda: len(rows(tmp_path, "old")) == 1, 60)
            shop.executescript(
                "BEGIN; CREATE TABLE filled (id INTEGER PRIMARY KEY); "
                "INSERT INTO filled VALUES (1), (2); COMMIT; ALTER TABLE old RENAME TO new"
            )
            shop.execute("INSERT INTO new VALUES (2, 2)")
            wanted = {
                "filled": [{"id": 1}, {"id": 2}],
                "new": [{"id": 1, "c": 1}, {"id": 2, "c": 2}],
            }
            for table, content in wanted.items():
                await eventually(lambda t=table, c=content: rows(tmp_path, t) == c, 60, table)
            shop.execute("INSERT INTO new VALUES (3, 3)")
            await eventually(lambda: len(rows(tmp_path, "new")) == 3, 60)
            assert {"id": 3, "c": 3} not in rows(tmp_path, "old")


async def test_without_the_triggers_a_column_is_dropped_and_the_table_resynchronised(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shop.db"
    config = database_config("shop", f"sqlite:///{path}", "main.*")
    with closing(sqlite3.connect(path, isolation_level=None)) as shop:
        shop.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, c INT)")
        async with capturing(config.model_copy(update={"resync": "auto"}), tmp_path) as fetcher:
            await streaming(fetcher)
            shop.execute("INSERT INTO t VALUES (1, 1)")
            with pytest.raises(sqlite3.OperationalError, match="databus_c_t after drop column"):
                shop.execute("ALTER TABLE t DROP COLUMN c")
            shop.executescript(
                "BEGIN; DROP TRIGGER databus_c_t; DROP TRIGGER databus_u_t; "
                "DROP TRIGGER databus_d_t; ALTER TABLE t DROP COLUMN c; "
                "INSERT INTO t VALUES (2); COMMIT"
            )

            await eventually(
                lambda: rows(tmp_path, "t") == [{"id": 1}, {"id": 2}], 60, "it is resynchronised"
            )
