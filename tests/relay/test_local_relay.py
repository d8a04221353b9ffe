"""The relay in one process: fetchers and server together, over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from databus.common.config import Config, parse
from databus.common.errors import ServerUnavailable, StoreError
from databus.relay.dumps import dump_records
from databus.relay.local_relay import LocalRelay
from databus.relay.processes import fetcher_durability
from databus.relay.ring.data_folder import read_document
from tests.support.waiting import PATIENCE, eventually

TEXT = """
[relay]
listen = "127.0.0.1:0"
data_dir = "data"
[[database]]
name = "gen"
url = "generator://?events_per_second=1000&events_per_window=5&keys=40&events=500"
ring_bytes = "1MiB"
sync_every = "20ms"
"""


def config(tmp_path: Path, text: str = TEXT) -> Config:
    return parse(text, folder=tmp_path)


async def test_events_and_a_dump_reach_a_reader_over_http(tmp_path: Path) -> None:
    async with LocalRelay(config(tmp_path)) as relay, aiohttp.ClientSession(relay.url) as session:
        await relay.ready()
        async with session.post("/v1/gen/dumps", json={"sources": ["gen.*"]}) as answer:
            assert answer.status == 202
            dump = await answer.json()

        async def dumped() -> bool:
            async with session.get(f"/v1/gen/dumps/{dump['id']}") as answer:
                return bool((await answer.json())["state"] == "completed")

        await eventually(dumped)
        intake = relay.fetchers["gen"].intake
        assert intake is not None
        await eventually(lambda: intake.complete.scn == 100)
        headers = {"Accept": "application/x-ndjson"}
        async with session.get("/v1/gen/stream?start=oldest", headers=headers) as answer:
            lines = [json.loads(line) for line in (await answer.text()).splitlines()]
    versions: dict[int, int] = {}
    for line in lines:
        if "op" in line:
            key = line["key"]["id"]
            assert line["after"]["version"] >= versions.get(key, -1)
            versions[key] = line["after"]["version"]
    assert sorted(versions) == list(range(40))
    assert max(versions.values()) == 499


async def test_a_full_disk_fails_a_dump_and_the_stream_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise StoreError(f"{path} cannot be written: No space left on device")

    text = TEXT.replace("&events=500", "")
    async with (
        LocalRelay(config(tmp_path, text)) as relay,
        aiohttp.ClientSession(relay.url) as http,
    ):
        await relay.ready()
        fetcher = relay.fetchers["gen"]
        body = {"sources": ["gen.*"]}
        with monkeypatch.context() as patch:
            patch.setattr(dump_records, "write_document", refuse)
            async with http.post("/v1/gen/dumps", json=body) as answer:
                assert "No space left" in (await answer.json())["detail"]
            await eventually(lambda: [one.state for one in fetcher.book] == ["failed"])
            scn = fetcher.status_document()["last"]["scn"]
            await eventually(lambda: fetcher.status_document()["last"]["scn"] > scn + 10)
        async with http.post("/v1/gen/dumps", json=body) as answer:
            assert answer.status == 202
        await eventually(lambda: [one.state for one in fetcher.book] == ["failed", "completed"])


async def test_what_the_disk_does_not_take_at_a_sync_is_written_at_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Path] = []
    has_room = False
    write = fetcher_durability.write_document

    def refuse(path: Path, content: bytes) -> None:
        if has_room:
            write(path, content)
            return
        refused.append(path)
        raise StoreError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(fetcher_durability, "write_document", refuse)
    # The fetcher remembers the rules for columns beside the ring.
    text = f'{TEXT}exclude_columns = ["gen.events.payload"]\n'
    async with LocalRelay(config(tmp_path, text)) as relay:
        await relay.ready()
        fetcher = relay.fetchers["gen"]
        resume_state = fetcher.folder.resume_state
        await eventually(lambda: len(refused) > 3)
        assert set(refused) == {resume_state}
        assert not resume_state.exists()
        has_room = True
        await eventually(resume_state.exists)
        retained = fetcher._durability.resume_state
        assert retained is not None
        assert read_document(resume_state) == retained.encode().encode()


async def test_a_waiting_reader_is_woken_by_the_commit_itself(tmp_path: Path) -> None:
    text = TEXT.replace("events_per_second=1000", "events_per_second=10")
    async with LocalRelay(config(tmp_path, text)) as relay:
        await relay.ready()
        async with aiohttp.ClientSession(relay.url) as session, asyncio.timeout(20 * PATIENCE):
            url = "/v1/gen/stream?start=latest&wait_ms=15000"
            async with session.get(url) as answer:
                assert await answer.read()


async def test_nothing_is_left_of_a_relay_that_was_closed(tmp_path: Path) -> None:
    for _ in range(2):
        async with LocalRelay(config(tmp_path)) as relay:
            await relay.ready()
            url = relay.url
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(url)
        assert not (tmp_path / "data" / "gen" / "fetcher.sock").exists()


async def test_a_relay_that_does_not_become_ready_reports_why(tmp_path: Path) -> None:
    text = TEXT.replace('ring_bytes = "1MiB"', 'ring_bytes = "1MiB"\nsources = ["shop.*"]')
    async with LocalRelay(config(tmp_path, text)) as relay:
        with pytest.raises(ServerUnavailable, match=r"no pattern matches gen\.events"):
            await relay.ready(2.0)
