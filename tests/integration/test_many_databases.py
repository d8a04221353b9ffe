"""Many databases on one relay: one that fails, or whose fetcher dies, does not touch the others."""

from __future__ import annotations

import contextlib
import sqlite3
import urllib.error
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from databus.common.checkpoint import OnlineCheckpoint, Position, encode
from databus.common.errors import BadCheckpoint, SourceUnavailable
from databus.common.frame.frame_format import FrameView, Op
from databus.relay.local_relay import LocalRelay
from tests.support.chain import QUICK, Served, databases_text, get_json, poll, relay_config
from tests.support.processes import wait_process_gone
from tests.support.relay_process import RelayProcess, ring_frames
from tests.support.waiting import eventually, eventually_sync

STEADY = "generator://?events_per_second=2000&events_per_window=10&payload_bytes=20&seed=3"
OTHER = "generator://?events_per_second=2000&events_per_window=10&payload_bytes=20&seed=4"


def scn_of(document: dict[str, Any], name: str) -> int:
    found = next(d for d in document["databases"] if d["name"] == name)
    return int(found.get("max", {}).get("scn", 0))


async def test_a_database_that_cannot_be_captured_is_shown_and_the_others_stream_on(
    tmp_path: Path,
) -> None:
    good = tmp_path / "good.db"
    with contextlib.closing(sqlite3.connect(good)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
        connection.commit()
        urls = {
            "steady": STEADY,
            "good": f"sqlite:///{good}",
            "bad": f"sqlite:///{tmp_path / 'missing' / 'no.db'}",
            "away": "relay+http://127.0.0.1:9/shop",
        }
        async with LocalRelay(relay_config(tmp_path / "data", urls), pace=QUICK) as relay:
            fetchers = relay.fetchers
            await eventually(lambda: fetchers["bad"].status.error is not None)
            await eventually(lambda: fetchers["away"].status.error is not None)
            await eventually(lambda: fetchers["steady"].status.state == "streaming")
            await eventually(lambda: fetchers["good"].status.state == "streaming")
            connection.execute("INSERT INTO items VALUES (1, 'one')")
            connection.commit()

            async def is_known() -> bool:
                document = await get_json(relay.url, "/v1/databases")
                states = {d["name"]: d["state"] for d in document["databases"]}
                assert states.pop("bad") in ("failed", "reconnecting")
                return states == {
                    "steady": "streaming", "good": "streaming", "away": "reconnecting",
                }  # fmt: skip

            await eventually(is_known)

            async def good_arrived() -> bool:
                views = (await poll(relay.url, "good")).frames
                return [view.op for view in views if not view.is_control] == [Op.INSERT]

            await eventually(good_arrived)
            first = scn_of(await get_json(relay.url, "/v1/databases"), "steady")

            async def grows() -> bool:
                return scn_of(await get_json(relay.url, "/v1/databases"), "steady") > first + 20

            await eventually(grows)
            status = await get_json(relay.url, "/v1/status")
            errors = {d["name"]: d["fetcher"].get("error") for d in status["databases"]}
            assert errors["steady"] is None
            assert errors["good"] is None
            assert errors["away"]["code"] == "source_unavailable"
            assert "no.db" in errors["bad"]["detail"]


async def test_two_databases_are_read_alternately_each_from_its_own_checkpoint(
    tmp_path: Path,
) -> None:
    names = ("east", "west")
    with contextlib.ExitStack() as stack:
        connections = {}
        for name in names:
            path = tmp_path / f"{name}.db"
            connections[name] = connection = stack.enter_context(
                contextlib.closing(sqlite3.connect(path, isolation_level=None))
            )
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
        urls = {name: f"sqlite:///{tmp_path / name}.db" for name in names}
        config = relay_config(tmp_path / "data", urls)
        async with LocalRelay(config, pace=QUICK) as relay:
            last_id = dict.fromkeys(names, 0)

            def insert(name: str, count: int) -> None:
                for _ in range(count):
                    last_id[name] += 1
                    row = (last_id[name], f"{name} {last_id[name]}")
                    connections[name].execute("INSERT INTO items VALUES (?, ?)", row)

            async def caught_up() -> bool:
                rows = {name: rows_of(await poll(relay.url, name)) for name in names}
                return rows == {name: last_id[name] for name in names}

            await eventually(
                lambda: all(relay.fetchers[name].status.state == "streaming" for name in names)
            )
            for _ in range(3):
                insert("east", 20)
                insert("west", 7)
            await eventually(caught_up)
            whole = {name: await poll(relay.url, name) for name in names}
            reached = {name: Position(*map(int, whole[name].prev.split(":"))) for name in names}
            found: dict[str, list[FrameView]] = {name: [] for name in names}
            round_count = 0
            while any(len(found[name]) < len(whole[name].frames) for name in names):
                round_count += 1
                assert round_count < 200
                for name in names:  # after a while one of them has no more events
                    checkpoint = OnlineCheckpoint(name, whole[name].clock, reached[name])
                    query = {"checkpoint": encode(checkpoint), "max_bytes": "300"}
                    served = await poll(relay.url, name, **query)
                    found[name] += served.frames
                    reached[name] = max([reached[name], *served.positions])
                    with pytest.raises(BadCheckpoint):
                        await poll(relay.url, names[name == "east"], **query)
            assert round_count > 20
            for name in names:
                is_known = [bytes(view.bytes) for view in found[name]]
                assert is_known == [bytes(view.bytes) for view in whole[name].frames]
                assert all(
                    name.encode() in bytes(view.after or b"")
                    for view in found[name] if not view.is_control
                )  # fmt: skip
            latest = {name: await poll(relay.url, name, start="latest") for name in names}
            assert [latest[name].frames for name in names] == [(), ()]
            insert("east", 1)
            insert("west", 2)
            await eventually(caught_up)
            for name, count in (("east", 1), ("west", 2)):
                newest = await poll(relay.url, name, scn=latest[name].newest)
                assert rows_of(newest) == count, "what came after the latest, and no more"


def rows_of(served: Served) -> int:
    return sum(not view.is_control for view in served.frames)


async def test_a_relay_is_ready_without_the_database_that_has_failed_unless_it_is_the_only_one(
    tmp_path: Path,
) -> None:
    wrong = "generator://?evnts=5"

    async def readiness(relay: LocalRelay) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(relay.url + "/readyz") as answer:
            return answer.status, await answer.text()

    both = relay_config(tmp_path / "two", {"steady": STEADY, "wrong": wrong})
    async with LocalRelay(both, pace=QUICK) as relay:

        async def is_ready() -> bool:
            return (await readiness(relay))[0] == 200

        await eventually(lambda: relay.fetchers["wrong"].status.state == "failed")
        await eventually(is_ready)
        with pytest.raises(SourceUnavailable, match="did you mean events"):
            await poll(relay.url, "wrong")
        assert (await poll(relay.url, "steady")).clock
    async with LocalRelay(relay_config(tmp_path / "one", {"wrong": wrong}), pace=QUICK) as relay:
        await eventually(lambda: relay.fetchers["wrong"].status.state == "failed")

        async def says_why() -> bool:
            status, text = await readiness(relay)
            return status == 503 and "wrong has not opened its source yet (state failed)" in text

        await eventually(says_why)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_killing_one_databases_fetcher_again_and_again_leaves_the_other_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(databases_text(tmp_path / "data", {"steady": STEADY, "victim": OTHER}))
    with RelayProcess(path) as relay:
        relay.ready()

        def fetcher_pid(name: str) -> int:
            return int(
                eventually_sync(lambda: relay.state(name)["fetcher"].get("pid", 0), 30, "a pid")
            )

        steady_pid = fetcher_pid("steady")
        for _ in range(5):
            victim_scn = scn_of(relay.get("/v1/databases"), "victim")
            pid = fetcher_pid("victim")
            assert pid != steady_pid
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
            wait_process_gone(pid)
            first = scn_of(relay.get("/v1/databases"), "steady")
            eventually_sync(
                lambda first=first: scn_of(relay.get("/v1/databases"), "steady") > first + 50, 20
            )
            assert relay.state("steady")["state"] == "streaming"
            eventually_sync(
                lambda scn=victim_scn: scn_of(relay.get("/v1/databases"), "victim") > scn, 30
            )
        assert fetcher_pid("steady") == steady_pid, "the other fetcher never died"
        with pytest.raises(urllib.error.HTTPError) as refused:
            relay.get("/v1/unknown/sources")
        refused.value.close()
        assert refused.value.code == 404
    for name in ("steady", "victim"):
        views = ring_frames(tmp_path / "data" / name)
        scns = [view.scn for view in views if view.op == Op.END_OF_WINDOW]
        assert scns == list(range(scns[0], scns[0] + len(scns))), "no window is missing"
