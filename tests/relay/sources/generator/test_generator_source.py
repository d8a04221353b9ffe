"""The generator source: the same stream from the same seed, from anywhere; chunks of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest

from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.errors import ConfigError, PreflightFailed
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameView, Op
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.generator.generator_source import (
    SCHEMA,
    GeneratorSource,
    Shape,
    parse_url,
)

BASE = "events_per_second=max&keys=7&events_per_window=3&payload_bytes=11&seed=5"


def source(query: str, sources: tuple[str, ...] = ("*",)) -> GeneratorSource:
    url = SourceUrl(f"generator://?{query}")
    return GeneratorSource(DatabaseConfig(name="gen", url=url, sources=sources))


async def stream(made: GeneratorSource, after_scn: int, least_bytes: int) -> bytes:
    data = b""
    async for batch in made.stream(after_scn):
        data += batch.data
        if len(data) >= least_bytes:
            break
    return data


def states(views: list[FrameView]) -> dict[int, tuple[int, int]]:
    """id -> (scn, version) after the frames."""
    found = {}
    for view in views:
        if view.source_id:
            assert view.after is not None
            row = SCHEMA.decode_row(view.after)
            found[row["id"]] = (view.scn, row["version"])
    return found


async def test_the_frames_are_valid_and_windows_are_counted_and_closed() -> None:
    data = await stream(source(f"{BASE}&events=40"), 0, 4000)
    views = list(frame_format.iter_frames(data))
    ends = [view for view in views if view.op == Op.END_OF_WINDOW]
    assert [view.scn for view in ends] == list(range(1, 15))
    assert [view.event_count for view in ends] == [3] * 13 + [1]
    assert [view.seq for view in views[:5]] == [0, 1, 2, 3, 0]
    assert bytes(ends[9].key) == b"10"
    rows = [view for view in views if view.source_id]
    assert len(rows) == 40
    assert all(view.key_hash == frame_format.key_hash(view.key) for view in rows)
    assert {view.source_id for view in rows} == {SCHEMA.source_id}
    assert {view.schema_fp for view in rows} == {SCHEMA.fingerprint}
    assert all(view.after is not None for view in rows)
    row = SCHEMA.decode_row(rows[0].after or b"")
    assert SCHEMA.decode_key(rows[0].key) == {"id": row["id"]}
    assert len(row["payload"]) == 11


async def test_each_key_is_inserted_once_and_only_updated_after_that() -> None:
    views = list(frame_format.iter_frames(await stream(source(f"{BASE}&events=70"), 0, 7000)))
    seen: set[bytes] = set()
    for view in views:
        if view.source_id:
            assert (view.op == Op.INSERT) == (bytes(view.key) not in seen)
            seen.add(bytes(view.key))
    assert len(seen) == 7


async def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not() -> None:
    one = await stream(source(BASE), 0, 50_000)
    two = await stream(source(BASE), 0, 50_000)
    assert one == two
    other = await stream(source(BASE.replace("seed=5", "seed=6")), 0, 50_000)
    assert other[:5000] != one[:5000]


async def test_a_stream_that_begins_later_is_the_rest_of_the_one_from_the_start() -> None:
    whole = await stream(source(BASE), 0, 100_000)
    rest = await stream(source(BASE), 12, 100_000)
    offset = next(view.offset for view in frame_format.iter_frames(whole) if view.scn == 13)
    size = min(len(whole) - offset, len(rest))
    assert whole[offset : offset + size] == rest[:size]


async def test_windows_larger_than_a_batch_are_cut_between_frames_and_continued() -> None:
    made = source("events_per_second=max&events_per_window=20000&payload_bytes=200&events=20000")
    batches = [batch async for batch in _until(made, 20_000)]
    assert len(batches) > 2
    views = [view for data in batches for view in frame_format.iter_frames(data)]
    assert [view.seq for view in views] == list(range(20_001))
    assert [view.op for view in views].count(Op.END_OF_WINDOW) == 1


async def _until(made: GeneratorSource, events: int) -> AsyncIterator[bytes]:
    async for batch in made.stream(0):
        yield batch.data
        if (await made.status())["events"] >= events:
            return


async def test_a_chunk_shows_exactly_the_state_that_the_stream_has_produced() -> None:
    made = source(f"{BASE}&keys=50&events=1000")
    for least_bytes in (100, 3000, 20_000):
        views = list(frame_format.iter_frames(await stream(made, 0, least_bytes)))
        rows = {}
        after = None
        while True:
            chunk = await made.read_chunk(ChunkRequest("gen.events", 8, after=after))
            for row in chunk.rows:
                found = SCHEMA.decode_row(row.row)
                assert SCHEMA.decode_key(row.key) == {"id": found["id"]}
                rows[found["id"]] = found["version"]
            if chunk.done:
                break
            after = chunk.last_key
        high = chunk.snapshot.high
        expected = {key: v for key, (scn, v) in states(views).items() if scn <= high}
        assert rows == expected
        assert await made.largest_key("gen.events") == [max(rows)]


async def test_a_chunk_of_keys_has_the_keys_without_a_row() -> None:
    made = source(BASE)
    await stream(made, 0, 100)
    keys = [[1], [99]]
    chunk = await made.read_chunk(ChunkRequest("gen.events", 10, keys=keys))
    assert (len(chunk.rows), chunk.missing) == (1, [[99]])


async def test_the_rate_is_held_and_an_ended_stream_stays_resolved() -> None:
    made = source("events_per_second=1000&events_per_window=5&events=100")
    started_s = time.monotonic()
    async for batch in made.stream(0):
        produced = (await made.status())["events"]
        assert produced <= (time.monotonic() - started_s) * 1000, "faster than its rate"
        if batch.resolved == 20 and not batch.data:
            break
    assert time.monotonic() - started_s >= 0.1


async def test_real_time_stamps_differ_and_seeded_ones_follow_the_rate() -> None:
    seeded = list(frame_format.iter_frames(await stream(source(BASE), 0, 4000)))
    assert seeded[4].commit_us - seeded[0].commit_us == 3
    real = list(frame_format.iter_frames(await stream(source(f"{BASE}&clock=real"), 0, 4000)))
    assert real[0].commit_us > seeded[0].commit_us
    assert bytes(real[0].after or b"") == bytes(seeded[0].after or b"")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("event_per_second=3", "did you mean events_per_second"),
        ("keys=0", "keys='0'"),
        ("events_per_second=fast", "events_per_second='fast'"),
        ("clock=mine", "did you mean clock"),
    ],
)
def test_a_wrong_parameter_is_named(query: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_url(f"generator://?{query}")


def test_an_option_is_refused_because_its_parameters_are_in_the_url() -> None:
    config = DatabaseConfig(name="shop", url=SourceUrl("generator://"), options={"seed": 2})
    with pytest.raises(
        ConfigError, match=r"database shop: unknown option 'seed'; .*has no options"
    ):
        GeneratorSource(config)


def test_everything_that_decides_the_bytes_is_part_of_the_clock() -> None:
    plain = Shape()
    assert parse_url("generator://").identity == plain.identity
    for query in ("seed=2", "keys=5", "payload_bytes=1", "events_per_window=3"):
        assert parse_url(f"generator://?{query}").identity != plain.identity


async def test_sources_that_match_nothing_are_found_by_the_preflight() -> None:
    with pytest.raises(PreflightFailed, match="gen"):
        await source(BASE, ("shop.*",)).open()


def test_the_kernels_give_the_same_bytes_without_the_compiler() -> None:
    program = (
        "import asyncio, hashlib\n"
        "from databus.common.compiled import kernels\n"
        "from databus.common.config import DatabaseConfig, SourceUrl\n"
        "from databus.relay.sources.generator.generator_source import GeneratorSource\n"
        f"url = SourceUrl('generator://?{BASE}&events=40')\n"
        "made = GeneratorSource(DatabaseConfig(name='g', url=url))\n"
        "async def first():\n"
        "    async for batch in made.stream(0):\n"
        "        return batch.data\n"
        "print(kernels.COMPILED, hashlib.sha256(asyncio.run(first())).hexdigest())\n"
    )
    answers = []
    for environment in ({}, {"DATABUS_NO_NUMBA": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        answers.append(done.stdout.split())
    assert answers[0][0] == "True"
    assert answers[1][0] == "False"
    assert answers[0][1] == answers[1][1]
