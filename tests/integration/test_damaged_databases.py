"""One database's files are damaged while the relay is down: it is named, the others stream on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.config import Config
from databus.common.errors import FormatError, ServerUnavailable, SourceUnavailable
from databus.common.frame.frame_format import Op
from databus.relay.local_relay import LocalRelay
from databus.relay.processes.fetcher import Fetcher
from databus.relay.ring.data_folder import read_document
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_format import CONTROL_OFFSETS, DATA_OFFSET, LIVE_OFFSET, SLOT_OFFSETS
from tests.support.chain import QUICK, get_json, poll, relay_config
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import eventually

URL = "generator://?events_per_second=500&events_per_window=5&payload_bytes=20&seed=3"
OTHERS = ("before", "behind")  # on either side of the damaged one


def flip(path: Path, at: int, count: int, step: int = 1) -> None:
    """Invert ``count`` bytes from ``at`` on, ``step`` apart."""
    content = bytearray(path.read_bytes())
    for offset in range(at, min(len(content), at + count * step), step):
        content[offset] ^= 0xFF
    path.write_bytes(content)  # the same inode: a live state would still be taken for one


def controls(folder: Path) -> None:
    for at in CONTROL_OFFSETS:
        flip(folder / "ring", at, 256)


def live_page(folder: Path) -> None:
    for at in (LIVE_OFFSET, *SLOT_OFFSETS):
        flip(folder / "ring", at + 8, 120)


def data(folder: Path) -> None:
    flip(folder / "ring", DATA_OFFSET, 4000, 97)


def everything(folder: Path) -> None:
    flip(folder / "ring", 0, (folder / "ring").stat().st_size)


def cut(folder: Path) -> None:
    with (folder / "ring").open("r+b") as ring:
        ring.truncate(ring.seek(0, 2) // 2)


def emptied(folder: Path) -> None:
    (folder / "ring").write_bytes(b"")


def not_a_file(folder: Path) -> None:
    (folder / "ring").unlink()
    (folder / "ring").mkdir()


def index(folder: Path) -> None:
    flip(folder / "ring.index", 0, (folder / "ring.index").stat().st_size)


def status(folder: Path) -> None:
    (folder / "status.json").write_bytes(b"\0" * 300)


def registry(folder: Path) -> None:
    flip(folder / "schemas.jsonl", 10, 40)


# What is damaged, and whether the database itself continues.
DAMAGE: list[tuple[Callable[[Path], None], bool]] = [
    (controls, False), (live_page, True), (data, True), (everything, False), (cut, False),
    (emptied, False), (not_a_file, False), (index, True), (status, True),
    (registry, False),
]  # fmt: skip


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("left")


def config_of(data_dir: Path) -> Config:
    names = (OTHERS[0], "hurt", OTHERS[1])
    return relay_config(data_dir, dict.fromkeys(names, URL), ring_bytes=1 << 18)


async def run_once(config: Config) -> None:
    """Let every ring have windows."""
    async with LocalRelay(config, pace=QUICK) as relay:
        await relay.ready(60)
        await eventually(
            lambda: all(
                fetcher.intake is not None and fetcher.intake.ring.last.scn > 20
                for fetcher in relay.fetchers.values()
            ),
            60,
        )


@pytest.mark.parametrize(("damage", "continues"), DAMAGE, ids=[each.__name__ for each, _ in DAMAGE])
async def test_damage_to_one_databases_files_is_named_and_leaves_the_others_alone(
    tmp_path: Path, damage: Callable[[Path], None], continues: bool, left_behind: Path
) -> None:
    data_dir = tmp_path / "data"
    if not (left_behind / "data").exists():
        await run_once(config_of(left_behind / "data"))
    shutil.copytree(left_behind / "data", data_dir)
    damage(data_dir / "hurt")
    config = config_of(data_dir)

    async def by_name(path: str) -> dict[str, dict[str, Any]]:
        document = await get_json(relay.url, path)
        return {each["name"]: each for each in document["databases"]}

    async with LocalRelay(config, pace=QUICK) as relay:

        async def have_begun() -> dict[str, int]:
            now = await by_name("/v1/databases")
            begun = {name: now[name]["max"]["scn"] for name in OTHERS if "max" in now[name]}
            return begun if len(begun) == len(OTHERS) else {}

        before = await eventually(have_begun, 60)

        async def others_stream() -> bool:
            now = await by_name("/v1/databases")
            assert set(now) == {*OTHERS, "hurt"}
            return all(
                now[name]["state"] == "streaming" and now[name]["max"]["scn"] > before[name] + 20
                for name in OTHERS
            )

        await eventually(others_stream, 60)
        for name in OTHERS:
            assert (await poll(relay.url, name)).frames

        async def is_named() -> bool:
            hurt = (await by_name("/v1/status"))["hurt"]
            if continues:
                return bool(hurt["state"] == "streaming" and hurt.get("max", {}).get("scn", 0) > 0)
            assert "/hurt/" in hurt["fetcher"]["error"]["detail"], hurt
            return bool(hurt["state"] == "failed")

        await eventually(is_named, 30)
        if continues:
            assert (await poll(relay.url, "hurt")).frames
        else:
            with pytest.raises((SourceUnavailable, FormatError)):
                await poll(relay.url, "hurt")
        async with aiohttp.ClientSession() as session:
            for path in ("/metrics", "/readyz", "/status"):
                async with session.get(relay.url + path) as answer:
                    assert answer.status == 200, await answer.text()


async def test_a_damaged_record_of_dumps_or_word_of_the_fetcher_does_not_hide_all_databases(
    tmp_path: Path,
) -> None:
    live = LiveRelay(tmp_path)
    async with live.served():
        live.folder.dumps.write_bytes(b"{")
        live.folder.status.write_bytes(bytes(300))
        document = (await get_json(live.url, "/v1/status"))["databases"][0]
        assert (document["name"], document["dumps"]) == ("shop", [])
    with pytest.raises(FormatError, match=r"dumps\.json is damaged"):
        Fetcher(live.config.database[0], tmp_path)
    by_name = json.loads(read_document(live.folder.status) or b"{}")
    assert (by_name["state"], "dumps.json" in by_name["error"]["detail"]) == ("failed", True)
    live.close()


async def test_a_database_whose_record_of_dumps_is_damaged_leaves_the_others_alone(
    tmp_path: Path, left_behind: Path
) -> None:
    data_dir = tmp_path / "data"
    if not (left_behind / "data").exists():
        await run_once(config_of(left_behind / "data"))
    shutil.copytree(left_behind / "data", data_dir)
    (data_dir / "hurt" / "dumps.json").write_bytes(b"{")
    config = config_of(data_dir)
    async with LocalRelay(config, pace=QUICK) as relay:
        assert set(relay.fetchers) == set(OTHERS)
        with pytest.raises(ServerUnavailable, match=r"hurt: .*dumps\.json is damaged"):
            await relay.ready(60)
        await eventually(lambda: all(each.intake for each in relay.fetchers.values()), 60)
        for name in OTHERS:
            assert (await poll(relay.url, name)).frames
        documents = (await get_json(relay.url, "/v1/status"))["databases"]
        (hurt,) = (each for each in documents if each["name"] == "hurt")
        assert hurt["state"] == "failed"
        assert "dumps.json" in hurt["fetcher"]["error"]["detail"]
        with pytest.raises(SourceUnavailable, match=r"dumps\.json is damaged.*move it away"):
            await poll(relay.url, "hurt")
        # Gone and come back, with the file put right.
        without = config.model_copy(
            update={"database": tuple(each for each in config.database if each.name != "hurt")}
        )
        await relay.reload(without)
        (data_dir / "hurt" / "dumps.json").unlink()
        await relay.reload(config)
        await relay.ready(60)
        assert set(relay.fetchers) == {*OTHERS, "hurt"}


async def test_what_another_boot_left_of_a_ring_is_not_served_before_its_fetcher_has_looked_at_it(
    tmp_path: Path,
) -> None:
    live = LiveRelay(tmp_path)
    live.append(window(1, [(Op.INSERT, ORDERS, 1)]))
    live.close()
    with (live.folder.path / "ring").open("r+b") as ring:  # as a power loss may leave it
        ring.seek(LIVE_OFFSET)
        ring.write(b"\x3f" * 4096)
    async with live.served():
        with pytest.raises(SourceUnavailable):
            await poll(live.url)
        assert "max" not in (await get_json(live.url, "/v1/databases"))["databases"][0]
        with Ring.open_writer(live.folder.path) as writer:
            assert writer.last.scn == 1
            assert len((await poll(live.url)).frames) == 2
