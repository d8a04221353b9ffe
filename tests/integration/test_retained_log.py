"""How much log PostgreSQL retains for a relay: little while it reads, and reported when it is
much."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.cli.demo.private_servers import PostgresServer
from databus.common.config import Config, parse
from databus.relay.local_relay import LocalRelay
from databus.relay.sources.postgres.protocol.lsn import flush_lsn, parse_lsn
from tests.support.capture import capturing, database_config, failed_with, ring_state, streaming
from tests.support.config_text import relay_text
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.timeout(300)]

FILLER = "INSERT INTO filler SELECT i, repeat('x', 900) FROM generate_series(1, 12000) i"


def config_of(server: PostgresServer, folder: Path) -> Config:
    text = relay_text(
        server.url("shop"),
        "public.*",
        data_dir="data",
        ring_bytes="4MiB",
        sync_every="50ms",
        options={"retained_wal_warning": "24MiB"},
    )
    return parse(text, folder=folder)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PostgresServer]:
    with PostgresServer(
        tmp_path / "server", options=["autovacuum=off", "wal_keep_size=0", "max_wal_size=64MB"]
    ) as found:
        for name in ("shop", "busy"):
            found.create_database(name)
        found.execute("CREATE TABLE orders (id INT PRIMARY KEY)", database="shop")
        found.execute("CREATE TABLE filler (id INT, v TEXT)", database="busy")
        found.execute("CREATE SCHEMA elsewhere", database="shop")
        found.execute("CREATE TABLE elsewhere.filler (id INT, v TEXT)", database="shop")
        yield found


async def metric(relay: LocalRelay, name: str) -> float | None:
    async with aiohttp.ClientSession(relay.url) as session, session.get("/metrics") as answer:
        text = await answer.text()
    found = re.search(rf'databus_relay_{name}{{database="shop"}} (\S+)', text)
    return float(found[1]) if found else None


def retained(server: PostgresServer) -> int:
    ((size,),) = server.execute(
        "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint "
        "FROM pg_replication_slots"
    )
    return int(size)


async def test_an_idle_captured_table_holds_nothing_back_while_others_write(
    server: PostgresServer, tmp_path: Path
) -> None:
    config = config_of(server, tmp_path)
    async with LocalRelay(config) as relay:
        await relay.ready(120)
        for database, filler in (
            ("busy", FILLER),
            ("shop", FILLER.replace("filler", "elsewhere.filler", 1)),
        ):
            ((before,),) = server.execute("SELECT pg_current_wal_lsn()::text")
            for _ in range(3):
                server.execute(filler, database=database)
            ((written,),) = server.execute(
                "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), %s::pg_lsn)::bigint", [before]
            )
            assert written > 30 << 20
            # Nothing is written to the server for this: it is sent the position that has been read.
            await eventually(lambda: retained(server) < 1 << 20, 90, "the log is released")
            server.execute("CHECKPOINT")

        async def shown() -> bool:
            size = await metric(relay, "source_retained_bytes")
            return size is not None and size < 20 << 20

        await eventually(shown, 90, "the metric follows")
        assert await metric(relay, "source_warnings") == 0


async def test_much_retained_log_is_a_warning_and_too_much_ends_by_name(
    server: PostgresServer, tmp_path: Path
) -> None:
    config = config_of(server, tmp_path)
    server.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '200MB'")
    server.execute("SELECT pg_reload_conf()")
    async with LocalRelay(config) as relay:
        await relay.ready(120)
        # A transaction that stays open holds the log back, whether it is read or not.
        with server.connect("shop") as connection:
            connection.execute("BEGIN")
            connection.execute("INSERT INTO orders VALUES (1)")
            for _ in range(3):
                server.execute(FILLER, database="busy")
            server.execute("CHECKPOINT")

            async def warned() -> bool:
                return bool(await metric(relay, "source_warnings"))

            await eventually(warned, 90, "the metric warns")
            status: dict[str, Any] = relay.fetchers["shop"].status_document()["source"]
            assert "retained_wal_warning" in status["warnings"][0]
            assert (await metric(relay, "source_retained_bytes") or 0) > 24 << 20
            assert (await metric(relay, "source_safe_bytes") or 0) > 0
            connection.execute("COMMIT")
    server.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '16MB'")
    server.execute("SELECT pg_reload_conf()")

    def given_up() -> bool:
        server.execute(FILLER, database="busy")
        server.execute("SELECT pg_switch_wal()")
        server.execute("CHECKPOINT")
        return server.execute("SELECT wal_status FROM pg_replication_slots") == [("lost",)]

    await eventually(given_up, 90, "the server has given the slot up")
    plain = database_config("shop", server.url("shop"), "public.*")
    async with capturing(plain, tmp_path / "data") as fetcher:
        message = await failed_with(fetcher, "source_position_lost")
    assert "max_slot_wal_keep_size" in message


async def test_a_source_is_acknowledged_only_up_to_what_is_on_disk(
    server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def confirmed_lsn() -> int:
        ((lsn,),) = server.execute("SELECT confirmed_flush_lsn::text FROM pg_replication_slots")
        return parse_lsn(str(lsn))

    def confirmed() -> bool:
        assert fetcher.intake is not None
        return confirmed_lsn() > fetcher.intake.complete.scn

    config = database_config("shop", server.url("shop"), "public.*")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        server.execute("INSERT INTO orders VALUES (1)", database="shop")
        await eventually(lambda: ring_state(tmp_path / "shop").letters == "c", 60)
        await eventually(confirmed, 90, "acknowledged")
        assert fetcher.intake is not None
        disk_answers = threading.Event()
        monkeypatch.setattr(fetcher.intake.ring, "sync", disk_answers.wait)
        synced = fetcher.intake.complete.scn
        for number in range(2, 12):
            server.execute(f"INSERT INTO orders VALUES ({number})", database="shop")
            await eventually(
                lambda last=number: ring_state(tmp_path / "shop").letters == "c" * last, 60
            )
        assert confirmed_lsn() <= flush_lsn(synced)
        assert fetcher.intake.complete.scn > synced
        monkeypatch.undo()
        disk_answers.set()
        server.execute("INSERT INTO orders VALUES (12)", database="shop")
        await eventually(lambda: ring_state(tmp_path / "shop").letters == "c" * 12, 60)
        await eventually(confirmed, 90, "acknowledged after the disk answered")
