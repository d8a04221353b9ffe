"""A user with exactly the rights that docs/managed-servers.md lists captures and dumps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_suspended_tables import dump
from tests.support.capture import capturing, database_config, ring_state, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "managed-servers.md"
USER = "databus_reader"


def statements(product: str, database: str) -> list[str]:
    """The statements of the page for a product, about ``database``."""
    found = re.search(rf"<!-- rights: {product} -->\n```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None, f"{PAGE} lists no rights for {product}"
    # The publication's name is the relay's, not the database's.
    text = re.sub(r"\bshop\b", database, found[1])
    return [one.strip() for one in text.split(";") if one.strip()]


@pytest.fixture(params=["mariadb", "mysql", "postgres"])
def reader(request: pytest.FixtureRequest) -> Iterator[tuple[FreshDatabase, str]]:
    """A database with a table and a user that has the page's rights; the user's URL."""
    database: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    database.execute("CREATE TABLE orders (id INT PRIMARY KEY, v INT)")
    database.execute("INSERT INTO orders VALUES (1, 10), (2, 20)")
    if request.param != "postgres":
        database.execute(f"DROP USER IF EXISTS {USER}")
    for statement in statements(request.param, database.name):
        database.execute(statement)
    yield database, re.sub(r"//[^@]*@", f"//{USER}:secret@", database.url)
    if request.param == "postgres":
        database.execute("DROP PUBLICATION databus_shop")
        database.execute(f"DROP OWNED BY {USER}")
        database.execute(f"DROP ROLE {USER}")
    else:
        database.execute(f"DROP USER {USER}")


async def test_a_user_with_the_rights_of_the_page_captures_and_dumps(
    reader: tuple[FreshDatabase, str], tmp_path: Path
) -> None:
    database, url = reader
    schema = "public" if url.startswith("postgres") else database.name
    source, folder = f"{schema}.orders", tmp_path / "relay" / "shop"
    async with capturing(database_config("shop", url, source), tmp_path / "relay") as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO orders VALUES (3, 30)")
        await eventually(lambda: ring_state(folder).letters == "c", 60, "the insert has come")
        database.execute("DELETE FROM orders WHERE id = 3")
        await eventually(lambda: ring_state(folder).letters == "cd", 60, "the delete has come")
        await dump(folder, source)
        rows = ring_state(folder).tables[source]
        assert rows == {(1,): {"id": 1, "v": 10}, (2,): {"id": 2, "v": 20}}
        assert not fetcher.status.error
