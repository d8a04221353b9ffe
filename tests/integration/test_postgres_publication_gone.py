"""A relay that may not alter its publication, and what others do with it and its tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig
from databus.relay.processes.fetcher import Fetcher
from tests.support.capture import (
    capturing,
    database_config,
    ring_state,
    streaming,
    suspended_in,
    upserted,
)
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CREATE = "CREATE PUBLICATION given FOR ALL TABLES WITH (publish_via_partition_root = true)"


@pytest.fixture
def reader(postgres_database: FreshDatabase) -> Iterator[str]:
    """The URL of an account with the rights of docs/managed-servers.md."""
    db = postgres_database
    name = f"reader_{db.name}"
    db.execute(f"CREATE ROLE {name} LOGIN REPLICATION PASSWORD 'pw'")
    db.execute(f"ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO {name}")
    host = db.url.rpartition("@")[2]
    yield f"postgresql://{name}:pw@{host}"
    db.execute(f"DROP OWNED BY {name}")
    db.execute(f"DROP ROLE {name}")


def config_of(url: str, **options: Any) -> DatabaseConfig:
    config = database_config("shop", url, "public.*", discover_every="200ms", **options)
    return config.model_copy(update={"resync": "auto"})


async def test_a_relay_makes_its_own_publication_again_with_all_tables(
    postgres_database: FreshDatabase, tmp_path: Path
) -> None:
    """Nothing is written meanwhile: before PostgreSQL 18 the position would be lost."""
    db, folder = postgres_database, tmp_path / "shop"
    for table in ("t", "other"):
        db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    config = config_of(db.url)
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO t VALUES (1)")
        await eventually(lambda: ring_state(folder).letters == "c", 30, "followed")
        ((publication,),) = db.execute("SELECT pubname FROM pg_publication")
        before = db.execute("SELECT oid FROM pg_publication")
        db.execute(f"DROP PUBLICATION {publication}")
        await eventually(
            lambda: db.execute("SELECT oid FROM pg_publication") not in ([], before), 30, "made"
        )
        await eventually(lambda: suspended_in(fetcher) == {}, 30, "resynchronised")
        await eventually(lambda: not fetcher.tables.document(), 30, "resynchronised")
        db.execute("INSERT INTO other VALUES (2)")
        await eventually(
            lambda: upserted(folder, "public.other")[0] == {(2,): {"id": 2}}, 30, "followed"
        )
    assert upserted(folder, "public.t")[0] == {(1,): {"id": 1}}


async def test_every_table_is_suspended_until_the_publication_is_there_again(
    postgres_database: FreshDatabase, reader: str, tmp_path: Path
) -> None:
    """Before PostgreSQL 18 the stream fails at the next change; since then it is silent."""
    db, folder = postgres_database, tmp_path / "shop"
    db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    db.execute("CREATE TABLE other (id int PRIMARY KEY)")
    db.execute(CREATE)
    config = config_of(reader, publication="given")
    is_silent = int(db.execute("SHOW server_version_num")[0][0]) >= 18_00_00
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO t VALUES (1)")
        await eventually(lambda: ring_state(folder).letters == "c", 30, "followed")
        db.execute("DROP PUBLICATION given")
        await eventually(
            lambda: suspended_in(fetcher).keys() >= {"public.t", "public.other"}, 30, "named"
        )
        db.execute("CREATE TABLE later (id int PRIMARY KEY)")
        if is_silent:
            db.execute("INSERT INTO later VALUES (1)")
        await eventually(lambda: "public.later" in suspended_in(fetcher), 30, "a new one is named")
        for source in ("public.t", "public.other", "public.later"):
            assert "the publication given is gone" in suspended_in(fetcher)[source]
            assert "CREATE PUBLICATION" in (fetcher.suspended() or {})[source].waits_for
        await eventually(
            lambda: any("could not be compared" in w for w in warnings(fetcher)), 30, "warned"
        )
        if is_silent:
            db.execute("INSERT INTO t VALUES (2)")
        db.execute(CREATE)
        await eventually(lambda: not suspended_in(fetcher), 60, "resynchronised")
        for table in ("t", "later"):
            db.execute(f"INSERT INTO {table} VALUES (3)")

        def is_equal() -> bool:
            # The dump may read a row whose event is in the stream already.
            return all(
                upserted(folder, f"public.{table}")[0].keys()
                == set(db.execute(f"SELECT id FROM {table}"))
                for table in ("t", "later")
            )

        await eventually(is_equal, 30)
        await eventually(
            lambda: not any("could not be compared" in w for w in warnings(fetcher)), 30, "well"
        )


def warnings(fetcher: Fetcher) -> list[str]:
    found = fetcher.status_document()["source"].get("warnings") or []
    return [str(warning) for warning in found]


async def test_a_table_that_loses_its_key_does_not_prevent_the_check_of_others(
    postgres_database: FreshDatabase, reader: str, tmp_path: Path
) -> None:
    """The relay cannot take it out of the publication."""
    db, folder = postgres_database, tmp_path / "shop"
    db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    db.execute("CREATE PUBLICATION given FOR TABLE t WITH (publish_via_partition_root = true)")
    config = config_of(reader, publication="given")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("ALTER TABLE t REPLICA IDENTITY NOTHING")
        await eventually(lambda: "public.t" in suspended_in(fetcher), 30, "named")
        assert 'ALTER PUBLICATION "given" DROP TABLE' in suspended_in(fetcher)["public.t"]
        db.execute("CREATE TABLE later (id int PRIMARY KEY)")
        db.execute("INSERT INTO later VALUES (1)")
        await eventually(lambda: "public.later" in suspended_in(fetcher), 30, "later is named")
        db.execute("ALTER PUBLICATION given ADD TABLE later")
        db.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT")
        await eventually(lambda: not suspended_in(fetcher), 60, "both are followed")
        db.execute("INSERT INTO later VALUES (2); INSERT INTO t VALUES (1)")
        await eventually(
            lambda: upserted(folder, "public.later")[0].keys() == {(1,), (2,)}, 30, "later"
        )
        await eventually(lambda: upserted(folder, "public.t")[0].keys() == {(1,)}, 30, "t")
