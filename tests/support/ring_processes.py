"""A ring's writer and its readers as processes of their own, for tests that race or kill them.

``python -m tests.support.ring_processes write|read ...`` is one of them.  ``write`` answers
each line "SEED WINDOWS" on its input with a forked child that writes, so that a writer that
is killed and started again costs milliseconds and not an interpreter's start.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from databus.common.checkpoint import Position
from databus.common.errors import ReaderOvertaken, ScnTooOld
from databus.common.frame.frame_format import iter_frames
from databus.relay.ring import ring_kernels
from databus.relay.ring.ring import Ring
from tests.support.windows import endless_windows, split_frames

ROOT = Path(__file__).resolve().parents[2]
MOST_EVENT_BYTES = 700


def true_frames(seed: int) -> Iterator[tuple[Position, bytes]]:
    """The frames that the writer with this seed writes, without end."""
    for window in endless_windows(seed, most_bytes=MOST_EVENT_BYTES):
        yield from split_frames(window)


def write(folder: Path, ring_bytes: int, seed: int, window_count: int) -> None:
    """Continue the stream of ``seed`` behind what the ring has, as a fetcher does."""
    rng = random.Random()
    writer = Ring.open_writer(folder, ring_bytes, clock="test")
    block = bytearray()
    windows = endless_windows(seed, most_bytes=MOST_EVENT_BYTES)
    for number, window in enumerate(windows):
        if number == window_count:
            break
        for frame in iter_frames(window):
            if frame.position > writer.last:
                block += frame.bytes
                if rng.random() < 0.02:
                    writer.append(bytes(block))
                    block.clear()
        if block and rng.random() < 0.3:
            writer.append(bytes(block))
            block.clear()
        if rng.random() < 0.01:
            writer.sync()
    if block:
        writer.append(bytes(block))
    writer.close()


def serve_writes(folder: Path, ring_bytes: int) -> None:
    """Fork a writer for each line on standard input and print its process id."""
    ring_kernels.warm_up()
    for line in sys.stdin:
        seed, window_count = map(int, line.split())
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                write(folder, ring_bytes, seed, window_count)
                status = 0
            finally:
                os._exit(status)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def read(folder: Path, seed: int, max_bytes: int, last: Position, deadline_s: float) -> None:
    """Read from the oldest frame until ``last``, comparing every byte; print what was seen."""
    reader = Ring.open_reader(folder)
    expected = true_frames(seed)
    position = reader.snapshot().prev
    ring_position = None
    may_skip = True
    frames_read = overtaken = 0
    give_up_s = time.monotonic() + deadline_s
    while position < last and time.monotonic() < give_up_s:
        try:
            if ring_position is None:
                ring_position = reader.find(position)
            block, ring_position = reader.read(ring_position, max_bytes)
        except ReaderOvertaken:
            overtaken, ring_position = overtaken + 1, None
            continue
        except ScnTooOld:
            overtaken, ring_position = overtaken + 1, None
            position, may_skip = reader.snapshot().prev, True
            continue
        for found, frame in split_frames(block):
            wanted, true = next(expected)
            while may_skip and wanted < found:
                wanted, true = next(expected)
            assert (found, frame) == (wanted, true), f"got {found}, expected {wanted}"
            may_skip = False
            position = found
            frames_read += 1
    report = {"frames": frames_read, "overtaken": overtaken, "end": [position.scn, position.seq]}
    print(json.dumps(report), flush=True)


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start one of the processes; the test ends it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.ring_processes", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def main(arguments: list[str]) -> None:
    """Run the process that the command line names."""
    what, folder, *rest = arguments
    if what == "write":
        serve_writes(Path(folder), int(rest[0]))
    else:
        seed, max_bytes, scn, seq = map(int, rest[:4])
        read(Path(folder), seed, max_bytes, Position(scn, seq), float(rest[4]))


if __name__ == "__main__":
    main(sys.argv[1:])
