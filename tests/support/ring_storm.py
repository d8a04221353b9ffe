"""One writer, many readers, a ring far too small for them: every byte that is read is checked.

``python -m tests.support.ring_storm --laps 100000 --readers 8`` runs the long version and
prints what happened as JSON; ``write`` and ``read`` are its processes.

The generator's stream goes through the ring as fast as it can.  For each frame of the true
stream the writer notes, before it appends it, how many 8-byte words lie before it and their
rolling hash, in a file that all map.  A reader checks the CRC of every frame, that frames follow
each other without a gap unless it was notified that it fell behind, and the rolling hash of what
it read against the true stream's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig
from databus.common.errors import ReaderOvertaken, ScnTooOld, StoreError
from databus.common.frame import frame_format
from databus.relay.capture.source_catalogue import create_source
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_check import check

ROOT = Path(__file__).resolve().parents[2]
EVENTS = 3
FRAMES = EVENTS + 1
FRAME_BYTES = 200
U64 = npt.NDArray[np.uint64]

_PERIOD = 1 << 12
_WEIGHTS: U64 = np.cumprod(np.full(_PERIOD, 0x9E3779B97F4A7C15, dtype=np.uint64), dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Storm:
    """What is written: ``windows`` windows through a ring of ``ring_bytes``."""

    folder: str
    ring_bytes: int
    windows: int
    seed: int

    @property
    def notes(self) -> Path:
        return Path(self.folder) / "notes"

    def map_notes(self, mode: Literal["r", "r+", "w+"]) -> U64:
        """Row n: words before frame n of the true stream, and their rolling hash."""
        shape = (self.windows * FRAMES + 1, 2)
        notes: U64 = np.memmap(self.notes, dtype=np.uint64, mode=mode, shape=shape)
        return notes


def weighted(words: U64, first: int) -> U64:
    """Each word times the weight of its index in the true stream."""
    return words * _WEIGHTS[(np.arange(len(words)) + first) % _PERIOD]


def number_of(position: Position) -> int:
    """Number of a frame in the true stream."""
    return (position.scn - 1) * FRAMES + position.seq


# -- the writer --


async def write(storm: Storm) -> None:
    """Continue behind what the ring has, to the end."""
    rng = random.Random()
    notes = storm.map_notes("r+")
    url = (
        f"generator://?events_per_second=max&events_per_window={EVENTS}&keys=500&seed={storm.seed}"
    )
    source = create_source(DatabaseConfig(name="storm", url=url))
    with Ring.open_writer(storm.folder, storm.ring_bytes, clock="storm") as writer:
        await source.open()
        stream = source.stream(writer.last.scn)
        async for batch in stream:
            columns = frame_format.scan(batch.data, verify=False)
            keep = int(np.searchsorted(columns.scn, np.uint64(storm.windows), side="right"))
            if keep:
                note(notes, columns, keep)
                stop = int(columns.offset[keep - 1] + columns.length[keep - 1])
                append_in_pieces(writer, batch.data[:stop], columns.offset[:keep], rng)
            if writer.last.scn >= storm.windows:
                break
        await stream.aclose()
    await source.close()


def note(notes: U64, columns: frame_format.FrameColumns, keep: int) -> None:
    """Note what lies before each of these frames, and before the one after them."""
    first = number_of(Position(int(columns.scn[0]), int(columns.seq[0])))
    base = int(notes[first, 0])
    stops = ((columns.offset + columns.length) >> 3)[:keep].astype(np.int64)
    words = columns.words[: int(stops[-1])]
    sums = np.cumsum(weighted(words, base), dtype=np.uint64)
    notes[first + 1 : first + 1 + keep, 1] = sums[stops - 1] + notes[first, 1]
    notes[first + 1 : first + 1 + keep, 0] = stops.astype(np.uint64) + np.uint64(base)


def append_in_pieces(writer: Any, data: bytes, offsets: Any, rng: random.Random) -> None:
    """Append a few frames, or many, at once; windows are often left open."""
    view, at = memoryview(data), 0
    while at < len(offsets):
        stop = min(len(offsets), at + rng.choice((1, 7, 40, 200)))
        end = int(offsets[stop]) if stop < len(offsets) else len(data)
        writer.append(view[int(offsets[at]) : end])
        at = stop
        if rng.random() < 0.001:
            writer.sync()


# -- a reader --


def read(storm: Storm, kind: str) -> dict[str, int]:
    """Read to the end of the stream, and check everything."""
    rng = random.Random()
    notes = storm.map_notes("r")
    last = Position(storm.windows, EVENTS)
    counts = dict.fromkeys(("frames", "bytes", "overtaken", "skipped_frames"), 0)
    with Ring.open_reader(storm.folder) as reader:
        position, expected = Position(0, 0xFFFFFFFF), 0
        ring_position: int | None = None
        while position < last:
            try:
                if ring_position is None:
                    ring_position = reader.find(position)
                block, ring_position = reader.read(ring_position, 1 if kind == "one" else 1 << 16)
            except ReaderOvertaken:
                ring_position = None
                continue
            except ScnTooOld:
                counts["overtaken"] += 1
                position, ring_position = reader.snapshot().prev, None
                number = number_of(position) + 1
                assert number > expected, f"too old, yet {number} was expected at {expected}"
                counts["skipped_frames"] += number - expected
                expected = number
                continue
            if block:
                position = verify(block, expected, notes)
                frames = number_of(position) + 1 - expected
                expected += frames
                counts["frames"] += frames
                counts["bytes"] += len(block)
            if kind == "napper" and rng.random() < 0.02:
                time.sleep(rng.random() * 0.05)  # this reader's nature; nothing is waited for
    return counts


def verify(block: memoryview, expected: int, notes: U64) -> Position:
    """Check whole frames that must begin with number ``expected``; position of the last."""
    columns = frame_format.scan(block)  # each CRC
    assert columns.stop == len(block)
    numbers = (columns.scn - np.uint64(1)) * np.uint64(FRAMES) + columns.seq
    assert int(numbers[0]) == expected, f"frame {int(numbers[0])} instead of {expected}"
    assert bool(np.all(np.diff(numbers) == 1)), "a gap inside a block"
    stop = expected + len(columns)
    words = columns.words
    assert int(notes[stop, 0] - notes[expected, 0]) == len(words)
    found = weighted(words, int(notes[expected, 0])).sum(dtype=np.uint64)
    assert found == notes[stop, 1] - notes[expected, 1], f"other bytes in {expected} to {stop}"
    return Position(int(columns.scn[-1]), int(columns.seq[-1]))


# -- all of them --


def run(
    *, laps: int, readers: int, kills: int, ring_bytes: int, seed: int, deadline_s: float
) -> dict[str, Any]:
    """Let a storm happen; raises AssertionError where a byte or a process was wrong."""
    windows = max(1, laps * ring_bytes // (FRAMES * FRAME_BYTES))
    with tempfile.TemporaryDirectory(prefix="ring-storm-") as folder:
        storm = Storm(folder, ring_bytes, windows, seed)
        storm.map_notes("w+")
        Ring.create(folder, ring_bytes, clock="storm").close()
        kinds = [("eager", "one", "napper")[at % 3] for at in range(readers)]
        processes = [_start("read", storm, kind) for kind in kinds]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            killed = _write_all(storm, kills, random.Random(seed), deadline_s)
            reports = []
            for kind, process in zip(kinds, processes, strict=True):
                out, errors = process.communicate(timeout=deadline_s)
                assert process.returncode == 0, f"{kind}, seed {seed}: {errors}"
                reports.append({"kind": kind, **json.loads(out)})
        finally:
            for process in processes:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout, process.stderr):
                    assert pipe is not None
                    pipe.close()
        problems = check(folder)
        assert problems == [], problems
        with Ring.open_reader(folder) as reader:
            written = reader.snapshot().tail
    return {
        "laps": written // ring_bytes,
        "written_bytes": written,
        "ring_bytes": ring_bytes,
        "writer_kills": killed,
        "seed": seed,
        "readers": reports,
    }


def _write_all(storm: Storm, kills: int, rng: random.Random, deadline_s: float) -> int:
    """Run the writer to its end, killed and started again ``kills`` times on its way."""
    killed = 0
    until_s = time.monotonic() + deadline_s
    while True:
        writer = _start("write", storm, "")
        goal = storm.windows * (killed + rng.random()) / kills if killed < kills else None
        try:
            while goal is not None and writer.poll() is None and _reached(storm) < goal:
                assert time.monotonic() < until_s, "the writer does not come on"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    writer.wait(0.005)
            if goal is None:
                _, errors = writer.communicate(timeout=deadline_s)
                assert writer.returncode == 0, errors
                return killed
            writer.kill()
            if writer.wait() == -signal.SIGKILL:
                killed += 1
            elif _reached(storm) >= storm.windows:
                return killed
        finally:
            writer.kill()
            writer.wait()
            for pipe in (writer.stdin, writer.stdout, writer.stderr):
                assert pipe is not None
                pipe.close()


def _reached(storm: Storm) -> int:
    try:
        with Ring.open_reader(storm.folder) as reader:
            return reader.snapshot().max.scn
    except StoreError:
        return 0


def _start(what: str, storm: Storm, kind: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.ring_storm", what, json.dumps(asdict(storm)), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def main(arguments: list[str]) -> None:
    """One of the processes, or all of them."""
    if arguments and arguments[0] in ("write", "read"):
        storm = Storm(**json.loads(arguments[1]))
        if arguments[0] == "write":
            asyncio.run(write(storm))
        else:
            print("ready", flush=True)
            print(json.dumps(read(storm, arguments[2])), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--laps", type=int, default=20_000)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ring-bytes", type=int, default=1 << 16)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--deadline-s", type=float, default=3600.0)
    print(json.dumps(run(**vars(parser.parse_args(arguments))), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
