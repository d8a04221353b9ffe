"""Every sink under the contract, with a failure at each of its calls, before and after it."""

from __future__ import annotations

import hmac
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import fastavro
import pytest
from aiohttp import web
from pyarrow import parquet

from databus.client.sinks import Sink, SinkRow, TroubledSink
from databus.client.sinks.sink_kinds import sink_of
from databus.client.sinks.webhook_sink import signature
from databus.common.checkpoint import Position
from databus.common.errors import ConfigError, SinkRefused
from databus.common.sink_config import SinkConfig
from tests.client.conftest import StartServer
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.shop import orders
from tests.client.sinks.sink_runs import Watched, sink_config, stored_checkpoint
from tests.client.sinks.test_sqlite_mirror import tables_of
from tests.support.s3_server import S3Server

SEED, WINDOWS, MOST_CALLS = 11, 6, 40
Changes = list[tuple[int, int, str, str]]


def expected_changes(seed: int = SEED, windows: int = WINDOWS) -> Changes:
    """What the workload has: (scn, seq, source, op) in order."""
    from databus.common.frame.frame_format import OP_LETTERS, iter_frames
    from tests.client.shop import ITEMS, ORDERS

    names = {one.source_id: one.source for one in (ORDERS, ITEMS)}
    return [
        (frame.scn, frame.seq, names[frame.source_id], OP_LETTERS[frame.op])
        for window in workload(seed, windows)[0]
        for frame in iter_frames(window)
        if frame.op in OP_LETTERS and frame.source_id in names
    ]


def read_files(folder: Path, expected: Changes | None = None) -> tuple[Changes, list[str]]:
    """The changes of all files up to the newest resolved mark, in the order of the paths."""
    paths = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "_databus" and not path.name.startswith(".")
    )
    marks = [path for path in paths if path.endswith(".RESOLVED")]
    found: Changes = []
    expected = expected_changes() if expected is None else expected
    for path in paths:
        data = (folder / path).read_bytes()
        if path.endswith(".ndjson"):
            for line in data.splitlines():
                one = json.loads(line)
                found.append((one["scn"], one["seq"], one["source"], one["op"]))
        elif path.endswith(".avro"):
            for one in fastavro.reader(io.BytesIO(data)):
                found.append((one["_scn"], one["_seq"], _target(path), one["_op"]))
        elif path.endswith(".parquet"):
            for one in parquet.read_table(io.BytesIO(data)).to_pylist():
                found.append((one["_scn"], one["_seq"], _target(path), one["_op"]))
        else:
            resolved = json.loads(data)["resolved"]["scn"]
            assert all(change[0] <= resolved for change in found), f"{path} is not of its place"
            wanted = sorted(change for change in expected if change[0] <= resolved)
            assert sorted(found) == wanted, f"{path} is early, or a change is there twice"
    return found, marks


def _target(path: str) -> str:
    return path.rpartition("/")[2].split("-")[3]


@dataclass
class Hook:
    """A receiver of webhooks."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    secret: str = "key"

    async def receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        expected = signature(self.secret, request.headers["Databus-Timestamp"], body)
        assert hmac.compare_digest(request.headers["Databus-Signature"], expected)
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), text="not now")
        self.bodies.append(json.loads(body))
        return web.Response()

    def changes(self) -> Changes:
        return [
            (one["scn"], one["seq"], one["source"], one["op"])
            for body in self.bodies
            for one in body.get("events", ())
        ]


@pytest.fixture
async def hook() -> AsyncIterator[Hook]:
    hook = Hook()
    app = web.Application()
    app.router.add_post("/hook", hook.receive)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    hook.url = "http://{}:{}/hook".format(*runner.addresses[0][:2])
    yield hook
    await runner.cleanup()


Found = Callable[[], None]


def sqlite_case(folder: Path, _: Hook) -> tuple[dict[str, Any], Found]:
    path = folder / "mirror.db"

    def check() -> None:
        assert stored_checkpoint(path).position.scn == WINDOWS
        assert tables_of(path) == workload(SEED, WINDOWS)[1]

    return {"sql": {"url": f"sqlite:///{path}"}}, check


def files_case(form: str) -> Callable[[Path, Hook], tuple[dict[str, Any], Found]]:
    def case(folder: Path, _: Hook) -> tuple[dict[str, Any], Found]:
        def check() -> None:
            found, marks = read_files(folder / "lake")
            assert sorted(found) == sorted(expected_changes())
            assert marks[-1].endswith(f"/{WINDOWS:020}.RESOLVED")

        settings = {"url": str(folder / "lake"), "format": form, "resolved_every": 0}
        return {"files": settings, "sql": None}, check

    return case


def webhook_case(folder: Path, hook: Hook) -> tuple[dict[str, Any], Found]:
    hook.bodies.clear()

    def check() -> None:
        first_seen = list(dict.fromkeys(hook.changes()))
        assert first_seen == expected_changes()
        seen: set[Any] = set()
        for body in hook.bodies:
            if "resolved" in body:
                resolved = body["resolved"]["scn"]
                assert {one for one in expected_changes() if one[0] <= resolved} <= seen
            seen |= {(o["scn"], o["seq"], o["source"], o["op"]) for o in body.get("events", ())}

    settings = {"url": hook.url, "secret": hook.secret, "batch_events": 3, "resolved": True}
    return {"webhook": settings, "sql": None, "data_dir": folder}, check


CASES = {
    "sqlite": sqlite_case,
    "ndjson": files_case("ndjson"),
    "avro": files_case("avro"),
    "parquet": files_case("parquet"),
    "webhook": webhook_case,
}


def config_of(server_url: str, settings: dict[str, Any]) -> SinkConfig:
    return sink_config(server_url, batch_rows=4, **settings)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("case", CASES)
async def test_a_failure_at_any_call_loses_nothing(
    scripted: StartServer, hook: Hook, tmp_path: Path, case: str, after: bool
) -> None:
    made = workload(SEED, WINDOWS)[0]
    server = await scripted(*made)
    for fails_at in range(MOST_CALLS):
        folder = tmp_path / str(fails_at)
        folder.mkdir()
        settings, check = CASES[case](folder, hook)
        config = config_of(server.url, settings)
        sink = TroubledSink(sink_of(config), fails_at, after=after)
        await Watched(config, sink, buffer_bytes=400).until_scn(WINDOWS)
        sink.check()
        check()
        if sink.call_count <= fails_at:
            break
    else:
        pytest.fail(f"{MOST_CALLS} calls were not enough")
    assert fails_at >= WINDOWS


async def test_a_stop_and_a_start_at_any_commit_lose_nothing(
    scripted: StartServer, hook: Hook, tmp_path: Path
) -> None:
    for name, case in CASES.items():
        folder = tmp_path / name
        folder.mkdir()
        settings, check = case(folder, hook)
        server = await scripted()
        for scn, window in enumerate(workload(SEED, WINDOWS)[0], start=1):
            server.append(window)
            config = config_of(server.url, settings)
            sink = TroubledSink(sink_of(config))
            await Watched(config, sink).until_scn(scn)
            sink.check()
        check()


async def test_files_of_a_commit_that_was_not_finished_are_removed(
    scripted: StartServer, tmp_path: Path
) -> None:
    from databus.client.sinks.files.file_sink import FileSink

    server = await scripted(*workload(SEED, WINDOWS)[0])
    settings, check = files_case("ndjson")(tmp_path, Hook())
    config = config_of(server.url, settings)
    sink = sink_of(config)
    assert isinstance(sink, FileSink)
    put = sink._store.put

    class Killed(BaseException):
        pass

    def dying(path: str, data: bytes) -> None:
        put(path, data)
        if "shop.orders" in path:
            raise SinkRefused("as by kill -9")

    sink._store.put = dying  # type: ignore[method-assign]  # dies in the middle of a commit
    with pytest.raises(SinkRefused):
        await Watched(config, sink).until_scn(WINDOWS)
    await Watched(config, sink_of(config)).until_scn(WINDOWS)
    check()


async def test_files_lie_in_a_bucket(scripted: StartServer, s3: S3Server, tmp_path: Path) -> None:
    server = await scripted(*workload(SEED, WINDOWS)[0])
    options = s3.options()
    url = s3.empty_prefix()
    bucket = url.removeprefix("s3://")
    address = options.endpoint.partition("://")[2]
    key = options.access_key
    secret = options.secret_key.get_secret_value()
    query = f"scheme=http&endpoint_override={address.replace(':', '%3A')}&region=us-east-1"
    settings = {"url": f"s3://{key}:{secret}@{bucket}?{query}", "format": "parquet"}
    config = config_of(server.url, {"files": settings, "sql": None})
    sink = sink_of(config)
    await Watched(config, sink).until_scn(WINDOWS)
    again = sink_of(config)
    from databus.client.sinks.files.file_sink import FileSink

    assert isinstance(again, FileSink)
    state = json.loads(again._store.get("_databus/copy.json") or b"")
    assert state["checkpoint"]["scn"] == WINDOWS


async def test_answers_of_a_webhook_are_retried_or_stop_the_sink(
    scripted: StartServer, hook: Hook, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1))
    settings = {"url": hook.url, "secret": "key"}
    config = config_of(server.url, {"webhook": settings, "sql": None, "data_dir": tmp_path})
    hook.statuses = [503, 429]
    process = Watched(config, sink_of(config))
    await process.until_scn(1)
    assert process.consumer.counts.rollbacks == 2
    server.append(orders(2, 1))
    hook.statuses = [400]
    with pytest.raises(SinkRefused, match="answered 400: not now"):
        await Watched(config, sink_of(config)).until_scn(2)


class Own(Sink):
    """A sink of a test: the rows in memory."""

    def __init__(self) -> None:
        self.rows: list[SinkRow] = []

    def write(self, batch: Any) -> None:
        self.rows.extend(batch.rows())

    def commit(self, checkpoint: Any) -> None:
        pass


async def test_a_sink_of_two_methods_gets_rows_in_commit_order(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(*workload(SEED, WINDOWS)[0])
    own = Own()
    await Watched(sink_config(server.url, data_dir=tmp_path), own).until_scn(WINDOWS)
    assert [(row.position.scn, row.position.seq, row.source, row.op) for row in own.rows] == (
        expected_changes()
    )
    again = Own()
    server.append(orders(WINDOWS + 1, 5))
    await Watched(sink_config(server.url, data_dir=tmp_path), again).until_scn(WINDOWS + 1)
    assert [row.position for row in again.rows] == [Position(WINDOWS + 1, 0)]


def test_a_sink_has_exactly_one_kind() -> None:
    kinds = "sql, kafka, redis, nats, search, files, webhook"
    with pytest.raises(Exception, match=f"exactly one of {kinds}"):
        sink_config("http://127.0.0.1:1", files={"url": "x"})
    with pytest.raises(ConfigError, match="none of"):
        sink_of(sink_config("http://127.0.0.1:1", sql={"url": "oracle://x"}))


async def test_a_sink_shows_its_metrics(scripted: StartServer, tmp_path: Path) -> None:
    server = await scripted(*workload(SEED, WINDOWS)[0])
    config = sink_config(server.url, data_dir=tmp_path, listen="127.0.0.1:0")
    texts: list[str] = []

    class Looking(Own):
        async def commit(self, checkpoint: Any) -> None:
            async with aiohttp.request("GET", f"{process.metrics_url}/metrics") as answer:
                texts.append(await answer.text())

    process = Watched(config, Looking())
    await process.until_scn(WINDOWS)
    assert f'databus_sink_rows_total{{sink="copy"}} {len(expected_changes())}.0' in texts[-1]
    assert f'databus_sink_newest_scn{{sink="copy"}} {WINDOWS}.0' in texts[-1]


async def test_rows_of_a_commit_that_was_made_can_be_left_out(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1, 2), orders(2, 3))
    found: list[Any] = []
    replayed: list[Any] = []

    class Looking(Own):
        def write(self, batch: Any) -> None:
            later = batch.after(Position(1, 0))
            found.extend(row.position for row in later.rows())
            found.extend(columns_of(later))
            earlier = batch.after(Position(2, 0), Position(1, 0))
            replayed.extend(row.position for row in earlier.rows())
            replayed.extend(pair for pairs in columns_of(earlier) for pair in pairs)

    def columns_of(batch: Any) -> list[Any]:
        names = ("_scn", "_seq")
        return [
            list(zip(*(table.arrow[name].to_pylist() for name in names), strict=True))
            for table in batch.tables()
        ]

    await Watched(sink_config(server.url, data_dir=tmp_path), Looking()).until_scn(2)
    rows = [one for one in found if isinstance(one, Position)]
    columns = [pair for one in found if not isinstance(one, Position) for pair in one]
    assert rows == [(1, 1), (2, 0)]
    assert columns == [(1, 1), (2, 0)]
    assert replayed == [(1, 0)] * 2
