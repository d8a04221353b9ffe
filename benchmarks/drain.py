"""Takes a backlog off a source in a process of its own, whose CPU and memory are all capture."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import multiprocessing as mp
import resource
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.upstreams import Backlog
from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.relay.capture.intake import Intake
from databus.relay.capture.source_catalogue import create_source
from databus.relay.ring.ring import Ring
from databus.relay.ring.schema_registry import Registry
from databus.relay.sources.contract import Batch

RING_BYTES = 64 << 20
DRAIN_S = 600
HASHED_ROWS = 100


@dataclass(frozen=True, slots=True)
class Drained:
    """What taking a backlog cost.  ``rows`` were counted, ``content`` is of the last ones."""

    rows: int
    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    content: str


def first_scn(config: DatabaseConfig) -> int:
    """The scn after which a new stream would start, with all that it needs made."""

    async def ask() -> int:
        source = create_source(config)
        try:
            await source.open()
            return await source.first_scn()
        finally:
            await source.close()

    return asyncio.run(ask())


def drain(backlog: Backlog, *, into_ring: bool) -> Drained:
    """Stream the backlog, and on request put it into a ring on disk.

    Raises:
        RuntimeError: the process failed, or not every row came.
    """
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(
        target=_answer, args=(theirs, backlog, into_ring), daemon=True
    )
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(DRAIN_S) else "no answer"
    except EOFError:
        found = "the process ended"
    finally:
        process.join(10)
        process.kill()
    if not isinstance(found, Drained):
        raise RuntimeError(f"the drain failed: {found}")
    if found.rows != backlog.rows:
        raise RuntimeError(f"{found.rows} rows came of {backlog.rows}")
    return found


def _answer(answer: Connection, backlog: Backlog, into_ring: bool) -> None:
    try:
        answer.send(uvloop.run(_drain(backlog, into_ring)))
    except Exception as error:
        answer.send(repr(error))


async def _drain(backlog: Backlog, into_ring: bool) -> Drained:
    source = create_source(backlog.config)
    await source.open()
    try:
        if not into_ring:
            return await _stream(backlog, source.stream(backlog.after_scn), None)
        with tempfile.TemporaryDirectory(prefix="databus-bench-") as name:
            folder = Path(name)
            ring = Ring.open_writer(
                folder, RING_BYTES, clock=source.clock, start=Position(backlog.after_scn)
            )
            registry = Registry(folder / "schemas.jsonl")
            try:
                intake = Intake(ring, registry)
                return await _stream(backlog, source.stream(backlog.after_scn), intake)
            finally:
                registry.close()
                ring.close()
    finally:
        await source.close()


async def _stream(
    backlog: Backlog, stream: AsyncGenerator[Batch, None], intake: Intake | None
) -> Drained:
    rows, newest = 0, b""
    cpu, started = time.process_time(), time.perf_counter()
    seconds = cpu_seconds = 0.0
    async with contextlib.aclosing(stream) as batches:
        async for batch in batches:
            if intake is not None:
                intake.take(batch)
                await asyncio.sleep(0)
            elif batch.data:
                rows += _row_count(batch.data)
                newest = batch.data
            if batch.resolved >= backlog.upto_scn:
                seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
                break
    # Before the look at what came, which is none of capture's work.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if intake is not None:
        state = intake.ring.state
        rows = state.frames - state.windows
        with Ring.open_reader(intake.ring.directory) as reader:
            ring_position = reader.snapshot().head
            while ring_position < reader.snapshot().tail:
                data, ring_position = reader.read(ring_position, 4 << 20)
                newest = bytes(data)
    return Drained(rows, seconds, cpu_seconds, peak, _content(newest))


def _row_count(data: bytes) -> int:
    """Rows in a batch, without a look at more than each frame's head."""
    columns = frame_format.scan(data, verify=False)
    return int(np.count_nonzero(columns.op < frame_format.FIRST_CONTROL_OP))


def _content(data: bytes) -> str:
    """Hash of the last rows: their keys and values, not their positions and times."""
    rows = [found for found in frame_format.iter_frames(data) if found.op == Op.INSERT]
    digest = hashlib.sha256()
    for row in rows[-HASHED_ROWS:]:
        digest.update(row.key)
        digest.update(row.after or b"")
    return digest.hexdigest()[:16]
