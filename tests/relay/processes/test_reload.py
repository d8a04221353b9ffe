"""Databases that come, change and go while the relay runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
from pathlib import Path

import aiohttp
import pytest

from databus.common.checkpoint import Position
from databus.common.config import Config, parse
from databus.common.errors import ConfigError, ServerUnavailable
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.relay.local_relay import LocalRelay
from databus.relay.processes.reload import SOCKET_NAME, ask_reload, changes
from databus.relay.processes.worker_channel import SupervisorChannel, WorkerChannel
from databus.relay.ring.data_folder import SocketName
from databus.relay.serving.counters.worker_counters import WorkerCounters, read_counters
from tests.support.capture import PACE
from tests.support.relay_process import RelayProcess
from tests.support.waiting import PATIENCE, eventually, eventually_sync, within

WAIT_S = 60.0

COMMAND = "from databus.cli.main import app; app()"
FRAMES = {"Accept": "application/vnd.databus.frames"}
RELAY = """
[relay]
listen = "127.0.0.1:0"
data_dir = "data"
workers = 2
heartbeat = "200ms"
"""


def database(name: str, extra: str = "", events: int = 0) -> str:
    limit = f"&events={events}" if events else ""
    return f"""
[[database]]
name = "{name}"
url = "generator://?events_per_second=300&seed=3{limit}"
ring_bytes = "1MiB"
{extra}
"""


def config(folder: Path, *databases: str, relay: str = RELAY) -> Config:
    return parse(relay + "".join(databases), folder=folder)


# -- what is to be done --


def test_each_difference_of_two_configurations_is_one_change(tmp_path: Path) -> None:
    old = config(tmp_path, database("a"), database("b"), database("c"))
    new = config(tmp_path, database("b", 'sync_every = "1s"'), database("c"), database("d"))
    assert changes(old, new).to_json() == {"added": ["d"], "changed": ["b"], "removed": ["a"]}
    assert changes(new, new).to_json() == {"added": [], "changed": [], "removed": []}


@pytest.mark.parametrize(
    ("relay", "databases", "message"),
    [
        (RELAY.replace("workers = 2", "workers = 3"), [database("a")], "workers"),
        (RELAY.replace("200ms", "1s"), [database("a")], "heartbeat"),
        (RELAY.replace('"data"', '"other"'), [database("a")], "data_dir"),
        (RELAY, [], "at least one"),
    ],
)
def test_what_needs_a_restart_is_refused_by_name(
    tmp_path: Path, relay: str, databases: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        changes(config(tmp_path, database("a")), config(tmp_path, *databases, relay=relay))


# -- in one process --


class Reader:
    """A follower of one database, on one connection for as long as it lives."""

    def __init__(self, session: aiohttp.ClientSession, name: str) -> None:
        self.splitter = frame_format.FrameSplitter()
        self.positions: list[Position] = []
        self.rows: list[str] = []
        self.keys: dict[str, set[bytes]] = {}
        self.error = ""
        self.task = asyncio.create_task(self._read(session, name))

    def has_more_than(self, count: int) -> bool:
        """Whether so many frames have come; an error ends the wait for them."""
        if self.error:
            raise ValueError(self.error)
        return len(self.positions) > count

    async def _read(self, session: aiohttp.ClientSession, name: str) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        url = f"/v1/{name}/stream?start=oldest&follow=true"
        async with session.get(url, headers=FRAMES, timeout=timeout) as answer:
            assert answer.status == 200
            async for chunk in answer.content.iter_any():
                self._take(self.splitter.feed(chunk))

    def _take(self, block: bytes) -> None:
        for view in frame_format.iter_frames(block):
            if view.op == Op.ERROR:
                self.error = bytes(view.after).decode()
            elif view.op != Op.HEARTBEAT:
                assert not self.positions or view.position > self.positions[-1]
                self.positions.append(view.position)
                if not view.is_control:
                    names = {frame_format.source_id(name): name for name in ("main.a", "main.b")}
                    name = names.get(view.source_id, "another")
                    self.rows.append(name)
                    keys = self.keys.setdefault(name, set())
                    if view.op == Op.TRUNCATE:
                        keys.clear()
                    else:
                        keys.add(bytes(view.key))


async def end(*readers: Reader) -> None:
    for reader in readers:
        reader.task.cancel()
    await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)


async def test_databases_come_change_and_go_and_the_readers_of_others_do_not_notice(
    tmp_path: Path,
) -> None:
    first = config(tmp_path, database("one"), database("two"))
    async with LocalRelay(first) as relay, aiohttp.ClientSession(relay.url) as session:
        await relay.ready()
        one, two = Reader(session, "one"), Reader(session, "two")
        await eventually(lambda: len(one.positions) > 50 and len(two.positions) > 50, WAIT_S)
        fetcher = relay.fetchers["one"]

        changed = 'sync_every = "50ms"'
        second = config(tmp_path, database("one"), database("two", changed), database("three"))
        await relay.reload(second)
        await relay.ready()
        three = Reader(session, "three")
        seen = len(two.positions)
        await eventually(
            lambda: len(three.positions) > 50 and len(two.positions) > seen + 50, WAIT_S
        )
        assert not two.task.done(), "its fetcher began again, its readers stay"
        assert relay.fetchers["two"].config.sync_every == 0.05

        await relay.reload(config(tmp_path, database("one"), database("three")))
        async with within(WAIT_S):
            await two.task
        assert "unknown_database" in two.error
        async with session.get("/v1/two/stream?start=oldest") as answer:
            assert answer.status == 404
        async with session.get("/v1/databases") as answer:
            names = [d["name"] for d in (await answer.json())["databases"]]
        assert names == ["one", "three"]

        await relay.reload(second)
        await relay.ready()
        again = Reader(session, "two")
        await eventually(
            lambda: again.positions and again.positions[-1] > two.positions[-1], WAIT_S
        )
        assert again.positions[: len(two.positions)] == two.positions, "its ring is the same"

        seen = len(one.positions)
        await eventually(lambda: len(one.positions) > seen, WAIT_S)
        assert relay.fetchers["one"] is fetcher
        assert not one.task.done()
        async with session.get("/metrics") as answer:
            text = await answer.text()
        assert 'databus_relay_readers{database="one"} 1.0' in text
        assert 'databus_relay_readers{database="two"} 1.0' in text
        await end(one, three, again)


@pytest.mark.slow
async def test_a_ring_that_is_resized_retains_what_fits_and_its_readers(tmp_path: Path) -> None:
    def sized(ring_bytes: str) -> Config:
        section = database("one").replace("_second=300", "_second=400")
        return config(tmp_path, section.replace("1MiB", ring_bytes))

    async with LocalRelay(sized("1MiB")) as relay, aiohttp.ClientSession(relay.url) as session:
        await relay.ready()

        async def ring() -> tuple[Position, dict[str, int]]:
            async with session.get("/v1/status") as answer:
                (document,) = (await answer.json())["databases"]
            return Position(**document["prev"]), document["ring"]

        async def resize(ring_bytes: str) -> None:
            await relay.reload(sized(ring_bytes))
            await relay.ready()
            seen = len(reader.positions)
            await eventually(lambda: reader.has_more_than(seen + 50), WAIT_S)

        async def has_evicted() -> bool:
            return (await ring())[0].scn > 0

        reader = Reader(session, "one")
        await eventually(lambda: len(reader.positions) > 50, WAIT_S)
        await resize("256KiB")
        await eventually(has_evicted, WAIT_S)
        before, facts = await ring()
        assert facts["capacity_bytes"] == 256 << 10
        await resize("64MiB")
        after, facts = await ring()
        assert facts["capacity_bytes"] == 64 << 20
        assert after >= before, "what was evicted has not come back"
        retained = Reader(session, "one")
        await eventually(
            lambda: retained.positions and retained.positions[-1] >= reader.positions[0], WAIT_S
        )
        await resize("32MiB")
        assert (await ring())[0] == after, "all of it fits"
        await end(reader, retained)
    assert reader.error == retained.error == ""
    every = set(reader.positions)
    assert {
        position for position in retained.positions if position <= reader.positions[-1]
    } <= every
    assert reader.positions == sorted(every)
    # Scns of the generator have no gaps, and each of its windows one event and an end.
    assert {p.scn for p in every} == set(range(1, reader.positions[-1].scn + 1))


async def test_a_database_that_is_added_and_cannot_be_captured_harms_no_other(
    tmp_path: Path,
) -> None:
    first = config(tmp_path, database("one"))
    async with LocalRelay(first) as relay, aiohttp.ClientSession(relay.url) as session:
        await relay.ready()
        reader = Reader(session, "one")
        bad = database("bad").replace("generator://?", "generator://?keys=none&")
        await relay.reload(config(tmp_path, database("one"), bad))
        await eventually(lambda: relay.fetchers["bad"].status.state == "failed", WAIT_S)
        seen = len(reader.positions)
        await eventually(lambda: len(reader.positions) > seen, WAIT_S)
        await relay.reload(config(tmp_path, database("one"), database("bad")))
        await relay.ready()
        await eventually(lambda: relay.fetchers["bad"].status.state == "streaming", WAIT_S)
        await end(reader)


# -- across processes --


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_relay_reads_its_file_again_without_a_restart_of_what_has_not_changed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(RELAY + database("one") + database("two"))

    def command() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", COMMAND, "reload", "-c", str(path)],
            capture_output=True,
            text=True,
            timeout=60 * PATIENCE,
            check=False,
        )

    def served(number: int) -> list[str]:
        return [d["name"] for d in relay.get("/v1/databases")["databases"]] * number

    with RelayProcess(path) as relay:
        relay.ready()
        workers = {child.pid for child in relay.children("databus.relay.http.relay_server")}
        fetchers = {child.pid for child in relay.children("databus.relay.processes.fetcher")}
        path.write_text(RELAY + database("one") + database("three"))
        done = command()
        assert (done.returncode, done.stdout) == (0, "added three\nremoved two\n"), done.stderr
        # Each worker has been notified; which one answers is the kernel's choice.
        for _ in range(20):
            eventually_sync(lambda: served(1) == ["one", "three"], 60)
        eventually_sync(lambda: relay.state("three")["state"] == "streaming", 60)
        eventually_sync(lambda: len(relay.children("databus.relay.processes.fetcher")) == 2, 60)
        now = {child.pid for child in relay.children("databus.relay.processes.fetcher")}
        assert len(now & fetchers) == 1

        path.write_text(path.read_text().replace("workers = 2", "workers = 1"))
        done = command()
        assert done.returncode == 2
        assert "workers" in done.stderr
        path.write_text("[relay")
        assert command().returncode == 2

        path.write_text(RELAY + database("one", 'sync_every = "1s"') + database("three"))
        os.kill(relay.process.pid, signal.SIGHUP)
        eventually_sync(
            lambda: {c.pid for c in relay.children("databus.relay.processes.fetcher")} - now, 60
        )
        assert {c.pid for c in relay.children("databus.relay.http.relay_server")} == workers

        # A worker that is restarted has what the others were sent.
        for child in relay.children("databus.relay.http.relay_server"):
            child.kill()
        eventually_sync(
            lambda: (
                len({c.pid for c in relay.children("databus.relay.http.relay_server")} - workers)
                == 2
            ),
            60,
        )
        for _ in range(20):
            assert served(1) == ["one", "three"]
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            relay.get("/v1/two/sources")
        refused.value.close()
        assert relay.end() == 0
    assert command().returncode == 1


async def test_a_request_where_no_relay_runs_gets_that_as_its_error(tmp_path: Path) -> None:
    with pytest.raises(ServerUnavailable, match="no relay"):
        await ask_reload(tmp_path / "nothing")
    with SocketName(tmp_path / SOCKET_NAME) as name:
        server = await asyncio.start_unix_server(lambda *_: None, name.path)
        server.close()
    with pytest.raises(ServerUnavailable, match="no relay"):
        await ask_reload(tmp_path)


# -- what the workers are sent --


class Notified:
    def __init__(self) -> None:
        self.what: list[tuple[str, int]] = []

    def add(self, database: object, wakeup_fd: int = -1) -> None:
        self.what.append((str(getattr(database, "url", "").reveal), wakeup_fd))

    def remove(self, name: str) -> None:
        self.what.append((name, -2))


async def test_a_wakeup_travels_to_a_worker_and_secrets_with_it(tmp_path: Path) -> None:
    notified, channel = Notified(), SupervisorChannel()
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    secret = database("a").replace("generator://?", "mariadb://u:hush@h/d?")
    found = config(tmp_path, secret).database[0]
    with WorkerChannel(os.dup(channel.worker_fd), notified):
        channel.started()
        channel.add(found, fd)
        channel.add(found)
        channel.remove("a")
        await eventually(lambda: len(notified.what) == 3, WAIT_S)
        url, theirs = notified.what[0]
        assert "hush" in url
        os.eventfd_write(theirs, 5)
        assert os.eventfd_read(fd) == 5
        assert notified.what[1:] == [(url, -1), ("a", -2)]
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        channel.remove("b")
    channel.close()
    os.close(fd)
    os.close(theirs)


async def test_a_worker_that_cannot_take_a_wakeup_ends_and_gets_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notified, channel, ending = Notified(), SupervisorChannel(), asyncio.Event()
    loop, found = asyncio.get_running_loop(), config(tmp_path, database("a")).database[0]
    loop.add_signal_handler(signal.SIGTERM, ending.set)

    def without_room(
        sock: socket.socket, size: int, most: int
    ) -> tuple[bytes, list[int], int, None]:
        return sock.recv(size), [], socket.MSG_CTRUNC, None

    monkeypatch.setattr(socket, "recv_fds", without_room)
    with WorkerChannel(os.dup(channel.worker_fd), notified), (tmp_path / "file").open("wb") as file:
        channel.started()
        channel.add(found, file.fileno())
        await asyncio.wait_for(ending.wait(), WAIT_S)
    assert not notified.what
    loop.remove_signal_handler(signal.SIGTERM)
    channel.close()


def test_the_counts_of_a_worker_outlive_the_coming_of_a_database(tmp_path: Path) -> None:
    counters = WorkerCounters(tmp_path, 0, ["a"])
    counters.add("a", "requests", 3)
    counters.add_database("b")
    counters.add("b", "requests", 4)
    counters.add_database("b")
    assert read_counters(tmp_path, 1, "a")["requests"] == 3
    assert read_counters(tmp_path, 1, "b")["requests"] == 4
    counters.close()


async def test_nothing_is_left_of_databases_that_came_and_went(tmp_path: Path) -> None:
    one = config(tmp_path, database("one"))
    two = config(tmp_path, database("one"), database("two"))
    async with LocalRelay(one) as relay, aiohttp.ClientSession(relay.url) as session:
        await relay.ready()

        async def round_trip() -> None:
            await relay.reload(two)
            await relay.ready()
            reader = Reader(session, "two")
            await eventually(lambda: reader.positions, WAIT_S)
            await relay.reload(one)
            async with within(WAIT_S):
                await reader.task
            assert "unknown_database" in reader.error

        await round_trip()
        before = sum(1 for _ in Path("/proc/self/fd").iterdir())
        maps = Path("/proc/self/maps").read_text().count("/data/two/")
        for _ in range(5):
            await round_trip()
        await eventually(lambda: sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before, WAIT_S)
        assert Path("/proc/self/maps").read_text().count("/data/two/") <= maps == 0


async def test_a_table_that_is_added_to_the_sources_joins_and_the_others_continue(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shop.db"

    def shop(*sources: str) -> Config:
        names = ", ".join(f'"{source}"' for source in sources)
        section = f'[[database]]\nname = "shop"\nurl = "sqlite:///{path}"\nsources = [{names}]\n'
        return config(tmp_path, section + 'sync_every = "20ms"\n', database("one"))

    with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection:
        for table in ("a", "b"):
            connection.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, text TEXT)")
        connection.commit()

        def insert(table: str, number: int) -> None:
            with connection:
                connection.execute(f"INSERT INTO {table} VALUES (?, 'x')", (number,))

        first = shop("main.a")
        async with (
            LocalRelay(first, pace=PACE) as relay,
            aiohttp.ClientSession(relay.url) as session,
        ):
            await relay.ready()
            reader, other = Reader(session, "shop"), Reader(session, "one")
            insert("a", 1)
            insert("b", 1)
            await eventually(lambda: reader.rows == ["main.a"], WAIT_S)
            await relay.reload(shop("main.a", "main.b"))
            await eventually(lambda: relay.fetchers["shop"].status.state == "streaming", WAIT_S)
            for number in (2, 3):
                insert("a", number)
                insert("b", number)
            # The row that the table had when it joined comes too: it is resynchronised.
            await eventually(lambda: len(reader.keys.get("main.b", ())) == 3, WAIT_S)
            await eventually(lambda: reader.rows.count("main.a") == 3, WAIT_S)
            seen = len(other.positions)
            await eventually(lambda: len(other.positions) > seen, WAIT_S)
            assert not reader.task.done()
            assert not other.task.done()
            await end(reader, other)
