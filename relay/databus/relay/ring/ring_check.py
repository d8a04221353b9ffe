"""Inspects a ring from outside: its content, and whether all its invariants hold.

Both work on a ring that is closed and on one that is being written, and change nothing.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

from databus.common.checkpoint import Position
from databus.relay.ring import ring_kernels
from databus.relay.ring.ring_file import RingFile
from databus.relay.ring.ring_format import (
    INDEX_NAME,
    LOCK_NAME,
    MODE_BLOCK,
    RING_NAME,
    RingState,
)
from databus.relay.ring.ring_reader import RingReader
from databus.relay.ring.ring_recovery import frame_at
from databus.relay.ring.scn_index import FANOUT, ScnIndex, split

CHECK_ATTEMPTS = 20


def describe_ring(directory: Path | str) -> dict[str, Any]:
    """What ``databus inspect ring`` shows: plain values, ready for JSON.

    Raises:
        StoreError: there is no ring, or no control copy is whole.
    """
    folder = Path(directory)
    with RingReader(folder) as reader:
        state = reader.snapshot()
        file, index = reader.file, reader.index
        control = file.newest_control()
        return {
            "path": str(folder / RING_NAME),
            "clock": control.clock,
            "mode": "block" if control.mode == MODE_BLOCK else "overwrite",
            "ring_bytes": control.ring_bytes,
            "used_bytes": state.tail - state.head,
            "head": state.head,
            "tail": state.tail,
            "synced": max(control.state.tail, state.synced),
            "prev": _json(state.prev),
            "min": _json(state.min),
            "max": _json(state.max),
            "min_commit_us": state.min_commit_us,
            "max_commit_us": state.max_commit_us,
            "frames": state.frames - state.evicted_frames,
            "windows": state.windows - state.evicted_windows,
            "frames_ever": state.frames,
            "windows_ever": state.windows,
            "epoch": file.epoch,
            "writer_pid": writer_pid(folder),
            "control": {
                name: None
                if copy is None
                else {
                    "sequence": copy.sequence,
                    "tail": copy.state.tail,
                    "max": _json(copy.state.max),
                }
                for name, copy in zip("ab", file.read_controls(), strict=True)
            },
            "index": None
            if index is None
            else {
                "path": str(folder / INDEX_NAME),
                "entries": len(index),
                "first": index.bounds[0],
                "step_bytes": index.step_bytes,
                "fanout": FANOUT,
                "lanes": index.lane_rows.tolist(),
            },
        }


def check(directory: Path | str) -> list[str]:
    """Every violation of the ring's invariants, as messages; none for a sound ring.

    Frames are read with their CRCs, so it takes about as long as reading the file.  Under a
    writer a violation counts if it is seen twice and the head has not moved.

    Raises:
        StoreError: there is no ring, or no control copy is whole.
    """
    with RingReader(Path(directory)) as reader:
        before: list[str] = []
        for _ in range(CHECK_ATTEMPTS):
            state = reader.snapshot()
            problems = _problems(reader.file, reader.index, state)
            if not problems or (problems == before and reader.snapshot().head == state.head):
                return problems
            before = problems
        return []


def writer_pid(directory: Path) -> int | None:
    """Process that has the ring open for writing, or None."""
    try:
        with (directory / LOCK_NAME).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                text = file.read().strip()
                return int(text) if text.isdigit() else None
            return None
    except FileNotFoundError:
        return None


def _problems(file: RingFile, index: ScnIndex | None, state: RingState) -> list[str]:
    problems = [
        f"control copy {name} is damaged"
        for name, copy in zip("AB", file.read_controls(), strict=True)
        if copy is None
    ]
    if not state.head <= state.tail <= state.head + file.data_bytes:
        problems.append(
            f"I1: head {state.head}, tail {state.tail} in a ring of {file.data_bytes} bytes"
        )
        return problems
    if not state.prev <= state.min <= state.max:
        problems.append(f"I3: prev {state.prev}, min {state.min}, max {state.max}")
    stop, last, frames, windows = ring_kernels.follow(
        file.data, state.head, state.tail, *split(state.prev)
    )
    if stop != state.tail:
        problems.append(
            f"I2, I3: no sound frame at ring position {stop}, offset "
            f"{file.file_offset(stop)} of the file; head {state.head}, tail {state.tail}"
        )
        return problems
    found = (frames, windows)
    expected = (state.frames - state.evicted_frames, state.windows - state.evicted_windows)
    if found != expected:
        problems.append(f"frames and windows are {found}, the counters state {expected}")
    newest = frame_at(file, last)[0] if last >= 0 else state.prev
    if newest != state.max:
        problems.append(f"the last frame is {newest}, max is {state.max}")
    if index is None:
        problems.append(f"there is no index of this ring at {file.path.parent / INDEX_NAME}")
    elif false_entry := index.problem(state.head, file.data_bytes + state.head):
        problems.append(f"index: {false_entry}")
    return problems


def _json(position: Position) -> dict[str, int]:
    return {"scn": position.scn, "seq": position.seq}
