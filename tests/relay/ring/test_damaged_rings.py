"""A ring that is damaged, moved away, replaced or cut under its readers, over HTTP."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest

from databus.common.checkpoint import OnlineCheckpoint, Position, encode
from databus.common.errors import SyncFailed
from databus.common.frame.frame_format import FrameSplitter, Op, iter_frames, key_hash
from databus.common.frame.spans import SpanSplitter
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_format import DATA_OFFSET
from databus.relay.ring.ring_recovery import frame_at
from tests.support.live_relay import CLOCK, ITEMS, ORDERS, LiveRelay, window
from tests.support.waiting import eventually, within

WINDOWS = 400
REQUESTED = {
    "all": "",
    "followed": "&follow=true",
    "one table": "&sources=shop.orders",
    "one operation": "&ops=c",
    "one partition": "&partition=mod:2:0",
    "a predicate": "&where=id%20%3E%205",
    "a column": "&columns=id",
}


def fill(live: LiveRelay) -> None:
    for scn in range(1, WINDOWS + 1):
        schema = ORDERS if scn % 2 else ITEMS
        live.append(window(scn, [(Op.INSERT, schema, scn)], text="x" * 1000))


def damage(live: LiveRelay, scn: int) -> tuple[str, int]:
    """Flip one bit of the row of ``scn``; the ring's file and the row's ring position."""
    path = live.folder.path / "ring"
    with Ring.open_reader(live.folder.path) as ring:
        at = ring.snapshot().head
        while frame_at(ring.file, at)[0].scn < scn:
            at += int.from_bytes(ring.file.copy(at, 8)[4:], "little")
    with path.open("r+b") as file:
        file.seek(DATA_OFFSET + at + 500)
        was = file.read(1)[0]
        file.seek(DATA_OFFSET + at + 500)
        file.write(bytes([was ^ 4]))
    return str(path), at


async def answer_of(http: aiohttp.ClientSession, url: str, spans: bool) -> tuple[list[int], str]:
    """(the scn that were received, the message of the error at the end)."""
    accept = f"{FRAMES_TYPE};spans=1" if spans else FRAMES_TYPE
    scns: list[int] = []
    async with http.get(url, headers={"Accept": accept}) as answer:
        if answer.status != 200:
            return scns, (await answer.json())["detail"]
        splitter = SpanSplitter() if spans else FrameSplitter()
        async for chunk in answer.content.iter_any():
            fed = splitter.feed(chunk)
            for data in fed if isinstance(fed, list | tuple) else [fed]:
                for view in iter_frames(bytes(data)):
                    if view.op == Op.ERROR:
                        return scns, json.loads(bytes(view.after or b""))["detail"]
                    if view.op == Op.INSERT:
                        scns.append(view.scn)
    return scns, ""


@pytest.mark.parametrize("how", REQUESTED)
@pytest.mark.parametrize("spans", [True, False], ids=["spans", "plain"])
async def test_a_damaged_frame_ends_each_answer_with_an_error_that_names_its_position(
    relay: LiveRelay, http: aiohttp.ClientSession, how: str, spans: bool
) -> None:
    fill(relay)
    path, at = damage(relay, 301)
    url = f"{relay.url}/v1/shop/stream?start=oldest{REQUESTED[how]}"
    scns, error = await answer_of(http, url, spans)
    before = range(6 if "predicate" in how else 1, 301, 2 if "table" in how else 1)
    if "partition" in how:
        before = [n for n in before if key_hash(ORDERS.encode_key((n,))) % 2 == 0]
    assert scns == list(before)
    assert path in error and f"ring position {at}," in error, error


@pytest.mark.parametrize("kind", ["application/x-ndjson", "text/event-stream"])
async def test_a_damaged_frame_ends_text_with_an_error(
    relay: LiveRelay, http: aiohttp.ClientSession, kind: str
) -> None:
    fill(relay)
    path, at = damage(relay, 301)
    url = f"{relay.url}/v1/shop/stream?start=oldest"
    async with http.get(url, headers={"Accept": kind}) as answer:
        text = await answer.text()
    assert path in text and f"ring position {at}," in text
    assert '"scn":300,' in text.replace(" ", "") and '"scn":301,' not in text.replace(" ", "")


async def test_readers_behind_the_damage_are_served(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    fill(relay)
    damage(relay, 301)
    checkpoint = encode(OnlineCheckpoint("shop", CLOCK, Position(350, 1)))
    url = f"{relay.url}/v1/shop/stream?checkpoint={quote(checkpoint)}"
    assert await answer_of(http, url, spans=False) == ([*range(351, WINDOWS + 1)], "")


@pytest.mark.parametrize("what", ["moved", "deleted", "replaced", "cut"])
async def test_a_ring_whose_file_was_moved_ends_the_answers_that_follow_it(
    relay: LiveRelay, http: aiohttp.ClientSession, tmp_path: Path, what: str
) -> None:
    fill(relay)
    folder, path = relay.folder.path, relay.folder.path / "ring"
    url = f"{relay.url}/v1/shop/stream?start=oldest&follow=true"
    async with http.get(url, headers={"Accept": "application/x-ndjson"}) as answer:
        while f'"scn":{WINDOWS},'.encode() not in (await answer.content.readline()).replace(
            b" ", b""
        ):
            pass
        if what == "moved":
            folder.rename(tmp_path / "elsewhere")
        elif what == "deleted":
            path.unlink()
        elif what == "replaced":
            shutil.copy(path, path.with_name("copy"))
            path.with_name("copy").replace(path)
        else:
            os.truncate(path, DATA_OFFSET + (1 << 19))
        async with within(60):
            rest = await answer.text()
    assert "source_unavailable" in rest and str(path) in rest
    expected = {
        "moved": "moved away or deleted",
        "deleted": "moved away or deleted",
        "replaced": "replaced by another file",
        "cut": f"cut to {DATA_OFFSET + (1 << 19)} bytes",
    }[what]
    assert expected in rest
    if what == "moved":
        (tmp_path / "elsewhere").rename(folder)
        assert (await answer_of(http, f"{relay.url}/v1/shop/stream?start=oldest", False))[0]
        return
    # What lies there now is not served before its writer has opened it, or is refused by name.
    async with http.get(f"{relay.url}/v1/shop/stream?start=oldest") as answer:
        assert answer.status == 503
        detail = (await answer.json())["detail"]
        assert ("cut" in detail and str(path) in detail) == (what == "cut")
    # Its writer acknowledges nothing more.
    relay.append(window(WINDOWS + 1, [(Op.INSERT, ORDERS, 1)])) if what != "cut" else None
    with pytest.raises(SyncFailed, match=expected):
        relay.writer.sync()


async def test_another_ring_in_the_folder_is_served_from_its_beginning(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    fill(relay)
    url = f"{relay.url}/v1/shop/stream?start=oldest"
    assert len((await answer_of(http, f"{url}&where=id%20%3E%205", False))[0]) == WINDOWS - 5
    (relay.folder.path / "ring").unlink()
    (relay.folder.path / "ring.index").unlink()
    other = LiveRelay(relay.folder.path.parent / "other")
    with other.writer:
        other.append(*(window(scn, [(Op.INSERT, ITEMS, 1)], text="y") for scn in range(1, 9)))
        for name in ("ring", "ring.index"):
            (other.folder.path / name).rename(relay.folder.path / name)

        async def is_served() -> bool:
            return len((await answer_of(http, url, False))[0]) == 8

        await eventually(is_served)
        assert (await answer_of(http, f"{url}&where=id%20%3E%205", False))[0] == []
        other.writer._file.path = relay.folder.path / "ring"
    other.registry.close()
    relay.writer._failure = SyncFailed("its file is gone")
