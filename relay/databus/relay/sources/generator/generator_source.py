"""The generator: a source without a database, for benchmarks and tests.

``generator://?events_per_second=N|max&payload_bytes=&events_per_window=&keys=&events=&seed=``
and ``&clock=seeded|real``.  One table ``gen.events`` (id, version, payload): the first
``keys`` events insert every id once, in an order derived from the seed; every later group of
``keys`` events updates every id once.  Window scn holds the events
[(scn - 1) * events_per_window, scn * events_per_window).

The same seed and shape give the same stream byte for byte, wherever it begins.  So commit
times count from a fixed day at the configured rate (``clock=seeded``); ``clock=real`` stamps
the time of packing instead, for measuring latency, and only then the bytes differ.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from databus.common.config import DatabaseConfig
from databus.common.errors import BadRequest, ConfigError, UnknownSource
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.common.spelling import spelling_advice
from databus.relay.sources.contract import (
    Batch,
    Chunk,
    ChunkRequest,
    Finding,
    Row,
    ScnSnapshot,
    TableSize,
    raise_findings,
)
from databus.relay.sources.generator import generator_kernels as kernels
from databus.relay.sources.row_buffers import Rows
from databus.relay.sources.source_options import SourceOptions, read_options

SCHEMA = SourceSchema(
    "gen.events",
    (
        Column("id", Kind.INT, nullable=False, type_name="bigint"),
        Column("version", Kind.INT, nullable=False, type_name="bigint"),
        Column("payload", Kind.STRING, nullable=False, type_name="text"),
    ),
    ("id",),
)
SEEDED_START_US = 1_704_067_200_000_000
MAX_KEYS = 2**31 - 1
_BLOCK_BYTES = 1 << 20
_PACE_S = 0.002
_IDLE_S = 0.5
_SEED_LIMIT = 2**62


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of the URL.  ``events_per_second`` of 0 is without a limit, ``events``
    of 0 without an end."""

    events_per_second: int = 1000
    payload_bytes: int = 100
    events_per_window: int = 10
    keys: int = 10_000
    events: int = 0
    seed: int = 1
    real_clock: bool = False

    @property
    def identity(self) -> str:
        """The clock's identity: all parameters that determine a window's content."""
        return (
            f"generator:seed={self.seed},events_per_window={self.events_per_window},"
            f"keys={self.keys},payload_bytes={self.payload_bytes}"
        )

    def last_scn(self, event_count: int) -> int:
        """The scn of the last window that is whole after ``event_count`` events."""
        if self.events and event_count >= self.events:
            return -(-self.events // self.events_per_window)
        return event_count // self.events_per_window

    def event_count(self, scn: int) -> int:
        """How many events the windows up to ``scn`` hold."""
        count = scn * self.events_per_window
        return min(count, self.events) if self.events else count


_LIMITS = {
    "events_per_second": (1, 10**9),
    "payload_bytes": (0, 1 << 24),
    "events_per_window": (1, 10**9),
    "keys": (1, MAX_KEYS),
    "events": (0, 10**15),
    "seed": (0, _SEED_LIMIT),
}


def parse_url(url: str) -> Shape:
    """The shape in a generator URL.

    Raises:
        ConfigError: a parameter is unknown or out of its range.
    """
    values: dict[str, Any] = {}
    for name, text in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name == "clock" and text in ("seeded", "real"):
            values["real_clock"] = text == "real"
        elif name == "events_per_second" and text == "max":
            values[name] = 0
        elif name in _LIMITS:
            least, most = _LIMITS[name]
            if not text.isdigit() or not least <= int(text) <= most:
                raise ConfigError(f"generator: {name}={text!r} is no number in {least}..{most}")
            values[name] = int(text)
        else:
            advice = spelling_advice(name, [*_LIMITS, "clock"])
            raise ConfigError(f"generator: unknown parameter {name}={text}; {advice}")
    return Shape(**values)


class GeneratorSource:
    """Generates windows; the module's docstring describes their content.

    Invariants:
        I1. A window's bytes depend on the shape and its scn alone (with ``clock=seeded``).
        I2. A chunk shows the table exactly after the last window that was yielded.

    Owner: one fetcher's event loop.
    """

    def __init__(self, config: DatabaseConfig) -> None:
        read_options(config, SourceOptions)
        self.shape = parse_url(config.url.reveal)
        self._database = config.name
        self._wanted = config.captures(SCHEMA.source)
        self._multiplier, self._inverse = kernels.multiplier_and_inverse(
            self.shape.seed, self.shape.keys
        )
        row_bytes = kernels.ROW_ROOM_BYTES + kernels.EOW_ROOM_BYTES + self.shape.payload_bytes
        self._block = np.zeros(max(_BLOCK_BYTES, row_bytes), dtype=np.uint8)
        self._next_event = 0

    @property
    def clock(self) -> str:
        """The clock's identity."""
        return self.shape.identity

    async def preflight(self) -> list[Finding]:
        """Check that the configuration names the one table."""
        if self._wanted:
            return []
        return [Finding("sources", "no pattern matches gen.events", 'sources = ["gen.*"]')]

    async def open(self) -> None:
        """Check the configuration; there is nothing to connect to."""
        raise_findings(self._database, await self.preflight())

    async def first_scn(self) -> int:
        """0: a new stream begins with the first window."""
        return 0

    async def stream(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        """All windows with a larger scn, at the configured rate from now on."""
        shape = self.shape
        self._next_event = first = shape.event_count(after_scn)
        started_s = time.monotonic()
        schemas: tuple[SourceSchema, ...] = (SCHEMA,)
        while True:
            stop = shape.events or 2**62
            if shape.events_per_second:
                passed_s = time.monotonic() - started_s
                due = first + int(passed_s * shape.events_per_second)
                stop = min(stop, due // shape.events_per_window * shape.events_per_window)
                if due >= shape.events > 0:
                    stop = shape.events
            data = self._pack(stop)
            resolved = max(after_scn, shape.last_scn(self._next_event))
            yield Batch(data, schemas, resolved)
            schemas = ()
            if not data or self._next_event >= stop:
                await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        shape = self.shape
        if shape.events and self._next_event >= shape.events:
            return _IDLE_S
        if not shape.events_per_second:
            return 0.0
        return min(_IDLE_S, max(_PACE_S, shape.events_per_window / shape.events_per_second))

    def _pack(self, stop_event: int) -> bytes:
        shape = self.shape
        if self._next_event >= stop_event:
            return b""
        rate = shape.events_per_second or 1_000_000
        with np.errstate(over="ignore"):
            self._next_event, size = kernels.put_events(
                self._block,
                self._next_event,
                stop_event,
                shape.events,
                shape.events_per_window,
                shape.keys,
                self._multiplier,
                shape.seed,
                shape.payload_bytes,
                SCHEMA.source_id,
                np.uint64(SCHEMA.fingerprint),
                time.time_ns() // 1000 if shape.real_clock else 0,
                SEEDED_START_US,
                1_000_000_000_000 // rate,
            )
        return self._block[:size].tobytes()

    async def ack(self, scn: int) -> None:
        """Nothing to do: the generator stores nothing."""

    async def schemas(self) -> list[SourceSchema]:
        """The one table."""
        return [SCHEMA]

    async def largest_key(self, source: str) -> list[Any] | None:
        """The largest id so far; None before the first window."""
        self._require(source)
        count = self.shape.event_count(self.shape.last_scn(self._next_event))
        if count >= self.shape.keys:
            return [self.shape.keys - 1]
        rows = self._rows_after(-1, self.shape.keys, self.shape.keys, count)
        return [rows[-1][0]] if rows else None

    async def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        """The key at which a chunk of ``limit`` rows ends; None if there are fewer."""
        chunk = await self.read_chunk(request)
        return None if chunk.done else chunk.last_key

    async def table_size(self, source: str) -> TableSize:
        """The number of keys: in the end each has a row."""
        self._require(source)
        count = self.shape.event_count(self.shape.last_scn(self._next_event))
        return TableSize(min(self.shape.keys, count))

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        """The rows after the last window that was yielded whole."""
        self._require(request.source)
        scn = self.shape.last_scn(self._next_event)
        count = self.shape.event_count(scn)
        if request.keys is not None:
            wanted = [self._id(key) for key in request.keys]
            pairs = [(row, self._last_event(row, count)) for row in wanted]
            found = [pair for pair in pairs if pair[1] >= 0]
            missing = [[row] for row, event in pairs if event < 0]
            rows = [self._row(row, event) for row, event in found]
            return Chunk(SCHEMA, Rows.of(rows), ScnSnapshot(scn), None, True, missing)
        after = self._id(request.after) if request.after else -1
        upto = self._id(request.upto) if request.upto else self.shape.keys - 1
        limit = min(request.limit, max(1, request.max_bytes // (1 + self.shape.payload_bytes)))
        found = self._rows_after(after, upto + 1, limit, count)
        done = len(found) < limit
        last_key = [found[-1][0]] if found else request.after
        rows = [self._row(row, event) for row, event in found]
        return Chunk(SCHEMA, Rows.of(rows), ScnSnapshot(scn), last_key, done)

    def _rows_after(self, after: int, stop: int, limit: int, count: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        row = after + 1
        while row < min(stop, self.shape.keys) and len(found) < limit:
            event = self._last_event(row, count)
            if event >= 0:
                found.append((row, event))
            row += 1
        return found

    def _last_event(self, row: int, count: int) -> int:
        if not 0 <= row < self.shape.keys:
            return -1
        with np.errstate(over="ignore"):
            return int(
                kernels.last_event_of_row(
                    self.shape.seed, row, count, self.shape.keys, self._inverse
                )
            )

    def _row(self, row: int, event: int) -> Row:
        out = np.empty(kernels.ROW_ROOM_BYTES + self.shape.payload_bytes, dtype=np.uint8)
        with np.errstate(over="ignore"):
            end = kernels.put_row(out, 0, self.shape.seed, row, event, self.shape.payload_bytes)
        return Row(SCHEMA.encode_key((row,)), out[:end].tobytes())

    def _id(self, key: list[Any]) -> int:
        if len(key) != 1 or not isinstance(key[0], int):
            raise BadRequest(f"the key {key!r} of gen.events is not one number")
        return key[0]

    def _require(self, source: str) -> None:
        if source != SCHEMA.source:
            raise UnknownSource(f"the generator has no source {source!r}; it has gen.events")

    async def committed_scn(self) -> int:
        """See ``Source.committed_scn``."""
        return self.shape.last_scn(self._next_event)

    async def status(self) -> dict[str, Any]:
        """The progress of the stream."""
        return {
            "server": "generator",
            "scn": self.shape.last_scn(self._next_event),
            "events": self._next_event,
        }

    async def close(self) -> None:
        """Nothing to do."""
