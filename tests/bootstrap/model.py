"""A plain model of the bootstrap: histories, states, and compaction by its definition."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.reading.bootstrap_stream import BootstrapStream
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import Run, RunKind, describe
from databus.bootstrap.runs.run_ids import new_run_id
from databus.bootstrap.runs.run_storage import LocalFiles
from databus.client.splits.frame_tables import as_table
from databus.common.checkpoint import ORIGIN, Position
from databus.common.filters.stream_filter import StreamFilter
from databus.common.frame import frame_format
from databus.common.frame.frame_format import (
    FIRST_CONTROL_OP,
    Buffer,
    Flag,
    FrameView,
    Op,
    iter_frames,
)
from databus.common.frame.window_builder import WindowBuilder

SOURCES = ("shop.orders", "shop.lines", "shop.notes")
CLOCK = "clock-1"
START = Position(9, 3)
"""Where histories begin: a log never begins at the origin but by chance."""


class History:
    """Random windows over a few keys of a few sources; the same seed gives the same ones."""

    def __init__(self, seed: int, *, keys: int = 6, payload_bytes: int = 12) -> None:
        self.rng = random.Random(seed)
        self.position = START
        self._keys = keys
        self._payload_bytes = payload_bytes

    def window(self, event_count: int | None = None) -> bytes:
        """The next window; now and then one that follows at the same scn, as a dump's does."""
        rng = self.rng
        same = rng.random() < 0.2
        scn = self.position.scn if same else self.position.scn + rng.choice((1, 1, 2, 50))
        builder = WindowBuilder(
            scn, 1_700_000_000_000_000 + scn, self.position.seq + 1 if same else 0
        )
        for _ in range(rng.randrange(5) if event_count is None else event_count):
            self._event(builder, dump=same)
        end = Position(scn, builder.seq)
        self.position = end
        return builder.end(f"t{scn}", dump=same)

    def _event(self, builder: WindowBuilder, *, dump: bool) -> None:
        rng = self.rng
        source = frame_format.source_id(rng.choice(SOURCES))
        key = b"k%d" % rng.randrange(self._keys)
        payload = rng.randbytes(self._payload_bytes)
        draw = rng.random()
        if dump:
            builder.event(Op.READ, source, 1, key, after=payload)
        elif draw < 0.02:
            builder.event(Op.TRUNCATE, source, 1, b"")
        elif draw < 0.25:
            builder.event(Op.DELETE, source, 1, key)
        elif draw < 0.4:
            builder.event(Op.UPDATE, source, 1, key, after=payload, absent=b"\x01")
        else:
            builder.event(rng.choice((Op.INSERT, Op.UPDATE)), source, 1, key, after=payload)

    def block(self, windows: int) -> bytes:
        """Some windows back to back."""
        return b"".join(self.window() for _ in range(windows))


class State:
    """What a consumer that applies frames has: by key the last row and what patched it since."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, bytes], list[bytes]] = {}
        self.newest: dict[tuple[int, bytes], Position] = {}
        self.patches: dict[tuple[int, bytes], set[Position]] = {}
        self.regressions: list[tuple[Position, Position]] = []

    def apply(self, one: FrameView) -> None:
        """Take one frame."""
        if one.is_control:
            return
        if one.op == Op.TRUNCATE:
            for other in [row for row in self.rows if row[0] == one.source_id]:
                del self.rows[other]
            for key in [key for key in self.patches if key[0] == one.source_id]:
                del self.patches[key]  # what patched the rows that are gone may come again
            return
        key = (one.source_id, bytes(one.key))
        patches = self.patches.setdefault(key, set())
        if one.flags & Flag.PARTIAL and one.position in patches:
            return  # sent again by a bootstrap that began again: it changes nothing
        before = self.newest.get(key, ORIGIN)
        if one.position < before:
            self.regressions.append((before, one.position))
        self.newest[key] = one.position
        if one.flags & Flag.PARTIAL:
            patches.add(one.position)
        else:
            patches.clear()
        if one.op == Op.DELETE:
            self.rows.pop(key, None)
        elif not one.flags & Flag.PARTIAL:
            self.rows[key] = [bytes(one.after or b"")]
        else:
            self.rows[key] = [*self.rows.get(key, []), bytes(one.after or b"")]

    def apply_all(self, blocks: Iterable[Buffer]) -> State:
        """Take all frames of some blocks."""
        for block in blocks:
            for one in iter_frames(block):
                self.apply(one)
        return self

    def copy(self) -> State:
        """Another one that is equal."""
        other = State()
        other.rows = {key: list(value) for key, value in self.rows.items()}
        other.newest = dict(self.newest)
        other.patches = {key: set(value) for key, value in self.patches.items()}
        return other


def frames_between(blocks: Iterable[bytes], after: Position, upto: Position) -> list[FrameView]:
    """The frames with a position in (after, upto]."""
    return [one for block in blocks for one in iter_frames(block) if after < one.position <= upto]


def compact(frames: Iterable[FrameView], *, base: bool) -> list[FrameView]:
    """Of each key the last whole frame and the partial ones after it; truncates cut."""
    retained: dict[tuple[int, bytes], list[FrameView]] = {}
    for one in frames:
        if one.op >= FIRST_CONTROL_OP:
            continue
        if one.op == Op.TRUNCATE:
            for key in [key for key in retained if key[0] == one.source_id]:
                del retained[key]
        key = (one.source_id, bytes(one.key))
        is_partial = one.flags & Flag.PARTIAL
        retained[key] = [*retained.get(key, []), one] if is_partial else [one]
    survivors = [one for group in retained.values() for one in group]
    if base:
        survivors = [one for one in survivors if one.op not in (Op.DELETE, Op.TRUNCATE)]
    return sorted(survivors, key=lambda one: one.position)


def clustered(frames: Iterable[FrameView]) -> list[FrameView]:
    """Frames in the order of clustered files: by source and key hash; truncates come first."""

    def place(one: FrameView) -> tuple[int, int, bool, bytes, Position]:
        is_row = one.op != Op.TRUNCATE
        key_hash = one.key_hash if is_row else 0
        return one.source_id, key_hash, is_row, bytes(one.key), one.position

    return sorted(frames, key=place)


def write_run(
    store: Store,
    kind: RunKind,
    start: Position,
    stop: Position,
    frames: list[FrameView],
    *,
    rows_per_group: int = 4,
    rows_per_file: int = 10,
    random_bytes: random.Random | None = None,
    bits: int | None = None,
) -> Run:
    """A run in small files of small row groups: of format 1, or clustered by ``bits`` of hashes."""
    rng = random_bytes or random.Random()
    run_id = new_run_id(kind, stop, rng.randbytes)
    folder = store.run_folder(run_id)
    folder.mkdir(parents=True)
    files = []
    pieces = _buckets(frames, bits) if bits is not None else _slices(frames, rows_per_file)
    for number, (piece, source, bucket) in enumerate(pieces):
        data = b"".join(bytes(one.bytes) for one in piece)
        path = folder / f"part-{number:05d}.parquet"
        pq.write_table(
            as_table(data, frame_format.scan(data)),
            path,
            row_group_size=rows_per_group,
            store_schema=False,
            write_page_checksum=True,
        )
        files.append(describe(LocalFiles(path.parent), path.name, source, bucket))
    truncates = {one.source_id: one.position for one in frames if one.op == Op.TRUNCATE}
    return Run(
        id=run_id,
        kind=kind,
        start=ORIGIN if kind is RunKind.BASE else start,
        stop=stop,
        files=tuple(files),
        created_us=1,
        partial_rows=sum(bool(one.flags & Flag.PARTIAL) for one in frames),
        truncates=tuple(sorted(truncates.items())),
        last_commit_us=max((one.commit_us for one in frames), default=0),
    )


_Pieces = Iterator[tuple[list[FrameView], int | None, str]]


def _slices(frames: list[FrameView], size: int) -> _Pieces:
    for at in range(0, len(frames), size):
        yield frames[at : at + size], None, ""


def _buckets(frames: list[FrameView], bits: int) -> _Pieces:
    def bucket(one: FrameView) -> tuple[int, str]:
        key_hash = 0 if one.op == Op.TRUNCATE else one.key_hash
        return one.source_id, f"{key_hash:064b}"[:bits]

    for (source, name), piece in itertools.groupby(clustered(frames), bucket):
        yield list(piece), source, name


def frames_of(store: Store, run: Run) -> list[FrameView]:
    """All frames of a run, read with pyarrow alone."""
    found: list[FrameView] = []
    for file in run.files:
        folder = Path(store.run_folder(file.folder or run))
        column = pq.read_table(folder / file.name, columns=["frame"])
        for value in column.column(0).to_pylist():
            found.extend(iter_frames(value))
    return found


def whole_stream(
    store: Store, log: HotLog, since: Position = ORIGIN, target: Position | None = None
) -> BootstrapStream:
    """What a reader that was at ``since`` is sent of all sources, up to the log's end."""
    return BootstrapStream(
        store=store,
        log=log,
        since=since,
        target=target or log.state().window,
        stream_filter=StreamFilter(),
        source_ids=np.empty(0, dtype=np.uint32),
    )


def state_of(store: Store, log: HotLog) -> State:
    """What a new reader ends with."""
    return State().apply_all(piece.frames for piece in whole_stream(store, log).pieces())
