"""Splits: what a reader of the store's files gets is what the server sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.bootstrap.merging import applier as applier_module
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.process_merges import ProcessMerges
from databus.bootstrap.reading import split_planner
from databus.bootstrap.runs import read_leases
from databus.bootstrap.runs.read_leases import LEASE_S
from databus.client.splits.split_planning import PlannedSplit, planned_splits
from databus.client.splits.split_reader import SplitReader
from databus.client.tables.table_reader import Range, TableAddress, TableReader
from databus.common.checkpoint import Position
from databus.common.errors import DatabusError, LogTooYoung, StoreError
from databus.common.frame.frame_format import Op, iter_frames, source_id
from databus.common.frame.window_builder import WindowBuilder
from tests.bootstrap import model
from tests.bootstrap.bench import Bench, rows_in

STEPS = 8


def reader_of(bench: Bench, source: str = "shop.*") -> TableReader:
    return TableReader(TableAddress("shop", source, bootstraps=(bench.url,), give_up_s=5))


def from_files(bench: Bench, planned: PlannedSplit) -> list[bytes]:
    """The frames of a split, as a task reads them."""
    reader = SplitReader(reader_of(bench, planned.split.source), planned)
    return sorted(frame for table in reader.tables() for frame in table.column("frame").to_pylist())


def from_server(bench: Bench, planned: PlannedSplit) -> list[bytes]:
    """The same from the server."""
    reader = reader_of(bench, planned.split.source)
    with contextlib.closing(reader.frames(planned.range)) as spool:
        blocks = [data.tobytes() for data, _, _ in spool.blocks()]
    return sorted(bytes(one.bytes) for block in blocks for one in iter_frames(block))


def begun(bench: Bench, scratch: Path) -> Applier:
    """An empty log with its origin, and its applier, which retains nothing but for readers."""
    bench.bind()
    bench.seed()
    bench.log.put_note("origin", model.START.to_json())
    return Applier(bench.store, ProcessMerges(scratch), grace_us=0)


def apply(bench: Bench, applier: Applier) -> None:
    """Write and merge everything into a base."""
    bench.write(8)
    bench.seal()
    applier.apply(full=True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, row groups and splits of a few rows."""
    monkeypatch.setattr(applier_module, "FILE_BYTES", 900)
    monkeypatch.setattr(applier_module, "ROW_GROUP_BYTES", 300)
    monkeypatch.setattr(split_planner, "ROW_GROUP_BYTES", 300)
    monkeypatch.setattr(split_planner, "LEAST_GROUPS", 1)


@pytest.mark.parametrize("tail_bytes", [1 << 20, 0])
async def test_rows_read_from_files_are_those_of_the_server(
    bench: Bench, tmp_path: Path, small: None, tail_bytes: int
) -> None:
    rng = random.Random(7 + tail_bytes)
    bench.history = model.History(rng.randrange(1000), keys=40)
    applier = begun(bench, tmp_path)
    positions = [model.START]
    splits = tails = 0
    for _ in range(STEPS):
        for _ in range(rng.randrange(1, 4)):
            bench.write(rng.randrange(1, 12))
            positions.append(bench.history.position)
            bench.seal()
        await asyncio.to_thread(applier.apply)
        for _ in range(rng.randrange(3)):
            bench.write(rng.randrange(1, 6))
            positions.append(bench.history.position)
        for requested in some_ranges(rng, positions):
            found = await compared(bench, requested, rng.randrange(1, 9), tail_bytes)
            splits += len(found)
            tails += sum(one.tail != b"" for one in found)
    assert splits > 30 and tails > 10


def some_ranges(rng: random.Random, positions: list[Position]) -> Iterator[Range]:
    """The present state, and at random positions a state and net changes."""
    yield Range("state", None, positions[-1], model.CLOCK)
    recent = positions[-12:]
    yield Range("state", None, rng.choice(recent), model.CLOCK)
    since, until = sorted(rng.sample(recent, 2)) if len(recent) > 1 else (recent[0],) * 2
    yield Range("net", since, until, model.CLOCK)


async def compared(
    bench: Bench, requested: Range, least: int, tail_bytes: int
) -> list[PlannedSplit]:
    """The splits of a range, each read from files and from the server, and all of them together."""
    if requested.mode == "state":
        query = {"scn": str(requested.until)}
    else:
        query = {"since": str(requested.since), "until": str(requested.until)}
    try:
        reader = reader_of(bench)
        found = await asyncio.to_thread(planned_splits, reader, requested, least, tail_bytes)
    except LogTooYoung as error:
        endpoint = "snapshot" if requested.mode == "state" else "changes"
        status, problem = await bench.get(f"/v1/shop/{endpoint}", **query)
        assert (status, problem["detail"]) == (410, error.message)
        return []
    if found:
        endpoint = "snapshot" if requested.mode == "state" else "changes"
        whole = rows_in(await bench.frames(endpoint, sources="shop.*", **query))
        every: list[bytes] = []
        for one in found:
            rows = await asyncio.to_thread(from_files, bench, one)
            assert rows == await asyncio.to_thread(from_server, bench, one)
            every += rows
        assert sorted(every) == sorted(whole)
    return found


async def test_a_lease_retains_the_files_and_the_state_while_it_is_renewed(
    bench: Bench, tmp_path: Path, small: None
) -> None:
    applier = begun(bench, tmp_path)
    await asyncio.to_thread(apply, bench, applier)
    bench.write(3)
    requested = Range("state", None, bench.history.position, model.CLOCK)
    found = await asyncio.to_thread(planned_splits, reader_of(bench), requested, 4)
    expected = [await asyncio.to_thread(from_server, bench, one) for one in found]
    bench.seal()
    for _ in range(3):
        await asyncio.to_thread(apply, bench, applier)
    for one, rows in zip(found, expected, strict=True):
        assert await asyncio.to_thread(from_files, bench, one) == rows
        assert await asyncio.to_thread(from_server, bench, one) == rows

    lease = found[0].lease
    status, renewed = await bench.get("/v1/shop/splits", lease=lease)
    assert (status, renewed["lease"]) == (200, lease)
    end_lease(bench, lease)
    for wrong in (lease, "../manifest", "0" * 32):
        status, problem = await bench.get("/v1/shop/splits", lease=wrong)
        assert (status, problem["code"]) == (410, "lease_expired")
    await asyncio.to_thread(apply, bench, applier)
    with pytest.raises(StoreError, match="cannot be read"):
        await asyncio.to_thread(from_files, bench, found[0])
    with pytest.raises(LogTooYoung):
        await asyncio.to_thread(from_server, bench, found[0])


def end_lease(bench: Bench, lease: str) -> None:
    """Let a lease be as old as one that nothing has renewed."""
    path = bench.store.folder / f"readers-lease-{lease}.json"
    note = json.loads(path.read_text())
    path.write_text(json.dumps(note | {"at_us": note["at_us"] - int(LEASE_S * 1e6)}))


async def test_a_file_that_was_replaced_is_found_before_its_first_row(
    bench: Bench, tmp_path: Path, small: None
) -> None:
    applier = begun(bench, tmp_path)
    await asyncio.to_thread(apply, bench, applier)
    requested = Range("state", None, bench.history.position, model.CLOCK)
    one, *_ = await asyncio.to_thread(planned_splits, reader_of(bench), requested, 1)
    path = Path(one.split.files[0].path)
    content = path.read_bytes()
    for damaged in (content + b"x", content[:-20] + bytes(12) + content[-8:]):
        path.write_bytes(damaged)
        with pytest.raises(StoreError):
            await asyncio.to_thread(from_files, bench, one)
    path.write_bytes(content)
    assert await asyncio.to_thread(from_files, bench, one)


async def test_of_one_table_of_many_hardly_more_than_its_own_bytes_are_read(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(f"shop.table_{number:02}" for number in range(40))
    monkeypatch.setattr(model, "SOURCES", names)
    applier = begun(bench, tmp_path)
    builder = WindowBuilder(model.START.scn + 1, 0, 0)
    for number in range(12_000):
        source = source_id(names[number % len(names)])
        builder.event(Op.INSERT, source, 1, b"k%d" % number, after=random.randbytes(1000))
    end = Position(model.START.scn + 1, builder.seq)
    bench.log.append(builder.end("t1"), 1)
    bench.seal()
    await asyncio.to_thread(applier.apply)
    reader = reader_of(bench, names[7])
    requested = Range("state", None, end, model.CLOCK)
    splits = await asyncio.to_thread(planned_splits, reader, requested, 2)
    before = read_bytes()
    rows = [row for one in splits for row in await asyncio.to_thread(from_files, bench, one)]
    taken = read_bytes() - before
    assert len(rows) == 12_000 / len(names)
    assert taken < 1.2 * sum(file.file_bytes for one in splits for file in one.split.files)


def read_bytes() -> int:
    """What this process has read from files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


async def test_there_are_not_more_leases_than_appliers_can_read(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applier = begun(bench, tmp_path)
    await asyncio.to_thread(apply, bench, applier)
    monkeypatch.setattr(read_leases, "MOST_LEASES", 1)
    requested = Range("state", None, bench.history.position, model.CLOCK)
    assert await asyncio.to_thread(planned_splits, reader_of(bench), requested, 1)
    with pytest.raises(StoreError, match="1 leases"):
        await asyncio.to_thread(planned_splits, reader_of(bench), requested, 1)
    (note,) = bench.store.folder.glob("readers-lease-*")
    end_lease(bench, note.name.removeprefix("readers-lease-").removesuffix(".json"))
    await asyncio.to_thread(apply, bench, applier)
    assert not note.exists()
    # A server of an earlier release has no such endpoint: the reader does not wait for it.
    with pytest.raises(DatabusError) as refused:
        await asyncio.to_thread(reader_of(bench).document, "no_splits", {})
    assert not refused.value.retry
