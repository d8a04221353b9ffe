"""kill -9 of the fetcher at random moments, in the middle of a stream and of a dump."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from databus.common.frame import frame_format
from databus.common.frame.frame_format import Flag, Op
from databus.relay.dumps.dump_records import DumpBook
from databus.relay.ring.ring import Ring
from databus.relay.sources.generator import generator_kernels as kernels
from databus.relay.sources.generator.generator_source import SCHEMA, SEEDED_START_US, parse_url
from tests.support.processes import wait_process_gone
from tests.support.relay_process import RelayProcess, ring_frames
from tests.support.waiting import eventually_sync
from tests.support.window_ends import as_source_gave

URL = (
    "generator://?events_per_second=10000&events_per_window=50&keys=3000&payload_bytes=60"
    "&events=100000"
)
CONFIG = f"""
[relay]
listen = "127.0.0.1:0"
data_dir = "data"

[[database]]
name = "gen"
url = "{URL}"
ring_bytes = "128MiB"
sync_every = "20ms"
"""
KEYS_INSERTED_SCN = 3000 // 50
LAST_SCN = 100_000 // 50
KILLS = 10
CHUNK_ROWS = 25


def expected() -> bytes:
    """The whole stream of the URL, made without a source."""
    shape = parse_url(URL)
    out = np.zeros(shape.events * 300, dtype=np.uint8)
    multiplier, _ = kernels.multiplier_and_inverse(shape.seed, shape.keys)
    stop, size = kernels.put_events(
        out, 0, shape.events, shape.events, shape.events_per_window, shape.keys, multiplier,
        shape.seed, shape.payload_bytes, SCHEMA.source_id, np.uint64(SCHEMA.fingerprint), 0,
        SEEDED_START_US, 1_000_000_000_000 // shape.events_per_second,
    )  # fmt: skip
    assert stop == shape.events
    return out[:size].tobytes()


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_kills_leave_no_gap_no_double_and_nothing_older_after_something_newer(
    tmp_path: Path,
) -> None:
    seed = random.randrange(1 << 30)
    moments = random.Random(seed)
    parallel = moments.choice((1, 3))
    print(f"seed {seed}, {parallel} chunks at once")
    path = tmp_path / "relay.toml"
    path.write_text(CONFIG)
    with RelayProcess(path) as relay:
        relay.ready()
        # A chunk that is read before every key is inserted rightly holds fewer rows.
        eventually_sync(lambda: relay.newest_scn("gen") >= KEYS_INSERTED_SCN, 60)
        request = {
            "sources": ["gen.*"],
            "chunk_rows": CHUNK_ROWS,
            "delay_ms": 5,
            "parallel": parallel,
        }
        dump = relay.send("POST", "/v1/gen/dumps", request)
        sent = SentRows(tmp_path / "data" / "gen")
        for number in range(KILLS):
            victim = relay.fetcher()
            if number % 2:
                # In the middle of its work; the others die while they start.
                eventually_sync(partial(_is_streaming, relay, victim.pid), 60)
            time.sleep(moments.uniform(0.0, 0.4))
            assert relay.state("gen")["clock"], "the workers serve all the time"
            victim.kill()
            wait_process_gone(victim.pid)
            # Only the chunk whose progress was not on disk yet goes out again, with any
            # parallelism.
            unrecorded = sent.unrecorded()
            print(f"kill {number}: {len(unrecorded)} rows go out again")
            assert len(unrecorded) <= CHUNK_ROWS, (number, sorted(unrecorded))

        def done() -> bool:
            return relay.newest_scn("gen") >= LAST_SCN

        eventually_sync(done, 90)

        def dumped() -> bool:
            nonlocal dump
            dump = relay.get(f"/v1/gen/dumps/{dump['id']}")
            return str(dump["state"]) not in ("queued", "running")

        eventually_sync(dumped, 60)
        assert dump["state"] == "completed", dump
    views = ring_frames(tmp_path / "data" / "gen")
    dump_ops = [view for view in views if view.op == Op.READ or view.flags & Flag.DUMP]
    streamed = [view for view in views if view.op != Op.READ and not view.flags & Flag.DUMP]
    assert [as_source_gave(view.bytes) for view in streamed] == [
        as_source_gave(view.bytes) for view in frame_format.iter_frames(expected())
    ], f"seed {seed}"
    positions = [view.position for view in views]
    assert positions == sorted(set(positions))
    rows = [view for view in dump_ops if view.op == Op.READ]
    # Every row has either gone out or been overtaken by the stream, and was recorded once.
    (table,) = dump["tables"]
    assert table["rows"] + table["dropped"] == 3000
    assert len({SCHEMA.decode_key(view.key)["id"] for view in rows}) >= table["rows"] > 0
    # Each kill repeats at most the chunk whose progress was not on disk yet.
    assert len(rows) <= 3000 + KILLS * CHUNK_ROWS
    _check_history(views)


class SentRows:
    """Which rows of the one dump are in the ring; reads on where it has read to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = -1
        self._ids: set[int] = set()

    def unrecorded(self) -> set[int]:
        """Those behind the dump's progress, as that is on disk.

        The ring is read first: a fetcher that is back already can only make them fewer.
        """
        with Ring.open_reader(self._folder) as reader:
            state = reader.snapshot()
            self._place = max(self._place, state.head)
            while self._place < state.tail:
                frames, self._place = reader.read(self._place, 1 << 30)
                data = bytes(frames)
                columns = frame_format.scan(data, verify=False)
                for offset in columns.offset[columns.op == Op.READ].tolist():
                    self._ids.add(
                        SCHEMA.decode_key(frame_format.read_frame(data, offset).key)["id"]
                    )
        (dump,) = DumpBook(self._folder / "dumps.json")
        if dump.tables is None:
            return self._ids
        (table,) = dump.tables
        if table.done:
            return set()
        return {key for key in self._ids if table.last_key is None or key > table.last_key[0]}


def _is_streaming(relay: RelayProcess, pid: int) -> bool:
    fetcher = relay.state("gen")["fetcher"]
    return bool(fetcher["pid"] == pid and fetcher["state"] == "streaming")


def _check_history(views: list[frame_format.FrameView]) -> None:
    newest: dict[int, int] = {}
    for view in views:
        if view.source_id and view.after is not None:
            row = SCHEMA.decode_row(view.after)
            assert row["version"] >= newest.get(row["id"], -1), (view.position, row)
            newest[row["id"]] = row["version"]
