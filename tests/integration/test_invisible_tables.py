"""Tables that take a captured name while the relay's account may not read them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from databus.relay.dumps.dump_records import new_dump
from databus.relay.processes.fetcher import Fetcher
from databus.relay.sources.mysql.gtid.mysql_lineage import decode_resume_state
from tests.integration.test_least_privileges import USER as READER
from tests.integration.test_least_privileges import statements as page_rights
from tests.integration.test_suspended_tables import rows_of
from tests.support.capture import capturing, database_config, stored_resume_state, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


TAKEN = {
    "from a schema that is not captured": "RENAME TABLE {other}.x TO met",
    "from a captured name": "RENAME TABLE t TO met",
    "by an ALTER": "ALTER TABLE t RENAME TO met",
}


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("how", TAKEN)
async def test_a_table_that_takes_a_name_without_the_privilege_is_suspended_when_it_returns(
    database: FreshDatabase, tmp_path: Path, how: str, restarted: bool
) -> None:
    name, other = database.name, f"{database.name}_other"
    database.server.create_database(other)
    for table in ("t", "fence", f"{other}.x"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")
    database.execute(f"INSERT INTO {other}.x VALUES (1, 10), (2, 20)")
    database.execute(f"DROP USER IF EXISTS '{READER}'@'%'")
    for statement in page_rights(database.server.product, name):
        database.execute(statement)
    url = re.sub(r"//[^@]*@", f"//{READER}:secret@", database.url)
    config = database_config("shop", url, f"{name}.*").model_copy(update={"resync": "auto"})
    folder = tmp_path / "shop"
    account = f"'{READER}'@'%'"

    async def execute(*statements: str) -> None:
        for statement in statements:
            await asyncio.to_thread(database.execute, statement)

    async def invisible() -> None:
        async def is_noted() -> bool:
            return decode_resume_state(stored_resume_state(fetcher)).invisible == (f"{name}.met",)

        await eventually(is_noted, 60, "the name is noted")

        def is_named() -> bool:
            shown = {one["source"]: one for one in fetcher.tables.document()}.get(f"{name}.met")
            return shown is not None and f"GRANT SELECT ON {name}.met" in shown["cure"]

        await eventually(is_named, 60, "the status names it")

    def equal() -> bool:
        rows: dict[tuple[Any, ...], Any] = {
            (number,): {"id": number, "v": v}
            for number, v in database.execute("SELECT id, v FROM met")
        }
        return rows_of(folder, f"{name}.met") == rows

    fetcher: Fetcher
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await execute("INSERT INTO t VALUES (1, 1), (3, 3)")
        await eventually(lambda: len(rows_of(folder, f"{name}.t")) == 2, 60)
        await execute(f"REVOKE SELECT ON {name}.* FROM {account}", TAKEN[how].format(other=other))
        await invisible()
        if not restarted:
            await execute(f"GRANT SELECT ON {name}.* TO {account}")
            await eventually(equal, 60, "the table is met")
            await execute("TRUNCATE TABLE met")  # No row or statement has shown its definition.
            await eventually(equal, 60, "it is emptied")
    if restarted:
        async with capturing(config, tmp_path) as fetcher:
            await invisible()
        await execute(f"GRANT SELECT ON {name}.* TO {account}")
        async with capturing(config, tmp_path) as fetcher:
            await eventually(equal, 60, "the table is met")
    assert decode_resume_state(stored_resume_state(fetcher)).invisible == ()


@pytest.mark.parametrize("dumped", ["by the relay itself", "by request"])
async def test_a_key_that_changes_without_the_privilege_leaves_no_row_under_the_old_key(
    database: FreshDatabase, tmp_path: Path, dumped: str
) -> None:
    """No row and no certain definition shows the stream that the key is another one."""
    name, table = database.name, f"{database.name}.t"
    for created in ("t", "fence"):
        database.execute(f"CREATE TABLE {created} (id INT PRIMARY KEY, v INT)")
    database.execute(f"DROP USER IF EXISTS '{READER}'@'%'")
    for statement in page_rights(database.server.product, name):
        database.execute(statement)
    url = re.sub(r"//[^@]*@", f"//{READER}:secret@", database.url)
    resync = "auto" if dumped == "by the relay itself" else "manual"
    config = database_config("shop", url, f"{name}.*").model_copy(update={"resync": resync})
    folder = tmp_path / "shop"
    rights = f"SELECT ON {name}.* {{}} '{READER}'@'%'"
    changes = (
        "INSERT INTO t VALUES (1, 1), (3, 3)",
        "REVOKE " + rights.format("FROM"),
        "ALTER TABLE t ADD k2 INT NOT NULL DEFAULT 7",
        "ALTER TABLE t DROP PRIMARY KEY, ADD PRIMARY KEY (id, k2)",
        "INSERT INTO fence VALUES (1, 1)",
        "GRANT " + rights.format("TO"),
        "INSERT INTO fence VALUES (2, 2)",
    )
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        for statement in changes:
            await asyncio.to_thread(database.execute, statement)
        await eventually(lambda: len(rows_of(folder, f"{name}.fence")) == 2, 60)
        if resync == "manual":
            await fetcher.start_dump(new_dump({"sources": [table]}))
        whole = {(n, 7): {"id": n, "v": n, "k2": 7} for n in (1, 3)}
        await eventually(lambda: rows_of(folder, table) == whole, 60, "it was read")


async def test_a_name_whose_table_is_gone_again_is_forgotten(
    database: FreshDatabase, tmp_path: Path
) -> None:
    name = database.name
    for table in ("t", "fence"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY)")
    config = database_config("shop", database.url, f"{name}.*")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
    # The catalogue that the relay reads at its return is behind both statements.
    database.execute("RENAME TABLE t TO met")
    database.execute("RENAME TABLE met TO other_name")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO fence VALUES (1)")
        await eventually(lambda: rows_of(tmp_path / "shop", f"{name}.fence"), 60)
        await eventually(lambda: bool(fetcher.status.source), 60, "its status")
        assert f"{name}.met" not in (fetcher.status.source.get("stopped_tables") or {})
    assert decode_resume_state(stored_resume_state(fetcher)).invisible == ()
