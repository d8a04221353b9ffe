"""The ids of runs: unique, and with the position at which the run stops."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from databus.bootstrap.runs.parquet_runs import RunKind
from databus.common.checkpoint import Position


def new_run_id(kind: RunKind, stop: Position, entropy: Callable[[int], bytes] = os.urandom) -> str:
    """An id that no other run has; its letter shows which role makes such runs."""
    letter = "s" if kind is RunKind.SEGMENT else "c"
    return f"{letter}-{stop.scn:016x}-{stop.seq:08x}-{entropy(4).hex()}"


def stop_of(run_id: str) -> Position | None:
    """Where the run of this id stops, from the id alone; None for other names."""
    found = re.fullmatch(r"[cs]-([0-9a-f]{16})-([0-9a-f]{8})-[0-9a-f]+", run_id)
    return Position(int(found[1], 16), int(found[2], 16)) if found else None
