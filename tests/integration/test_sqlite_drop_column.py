"""DROP COLUMN on SQLite: refused while triggers name the column, and how it is done."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from databus.common.frame import Op
from databus.relay.registry import RegistryReader
from tests.support.capture import capturing, database_config, streaming
from tests.support.relay_process import ring_frames
from tests.support.waiting import eventually


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

            def rows() -> list[dict[str, object]]:
                reader = RegistryReader(tmp_path / "shop" / "schemas.jsonl")
                found: dict[bytes, dict[str, object]] = {}
                reader.refresh()
                for view in ring_frames(tmp_path / "shop"):
                    if view.op == Op.TRUNCATE:
                        found.clear()
                    elif view.after is not None and not view.is_control:
                        schema = reader.schemas.by_fingerprint(view.schema_fp)
                        found[bytes(view.key)] = schema.decode_row(view.after)
                return list(found.values())

            await eventually(lambda: rows() == [{"id": 1}, {"id": 2}], 60, "it is resynchronised")
