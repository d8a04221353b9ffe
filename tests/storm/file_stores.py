"""Small stores of every kind, and everything that our processes read of them.

A store is built once.  ``read`` opens it as production does and returns what it holds, as plain
values.  Not here: which bytes are damaged, and what counts as right (``files.py``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.reading.bootstrap_stream import BootstrapStream
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.bootstrap.runs.parquet_runs import Run, RunKind
from databus.bootstrap.runs.store_summary import describe
from databus.client.checkpoints.checkpoint_stores import FileCheckpoints, LmdbCheckpoints
from databus.common.checkpoint import ORIGIN, OnlineCheckpoint, Position, encode
from databus.common.config import parse
from databus.common.errors import DatabusError
from databus.common.filters.frame_selection import copy_of
from databus.common.filters.stream_filter import StreamFilter, matching_ids
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.common.table_state import CaptureState
from databus.relay.capture.intake import Intake
from databus.relay.dumps.dump_records import DumpBook, new_dump
from databus.relay.dumps.table_records import TableBook, TableRecord
from databus.relay.processes.fetcher import Fetcher
from databus.relay.processes.wakeup import WakeupReceiver, make_wakeup
from databus.relay.ring.data_folder import DatabaseFolder, read_document, write_document
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_check import describe_ring
from databus.relay.ring.schema_registry import Registry, RegistryReader
from databus.relay.serving.database_view import DatabaseView
from databus.relay.serving.extents import Extents
from databus.relay.serving.header_cache import HeaderCache
from tests.bootstrap.model import CLOCK, SOURCES, START, History, compact, frames_between, write_run

RING_BYTES = 160 << 10
ORDERS = SourceSchema(
    "shop.orders",
    (Column("id", Kind.INT, nullable=False), Column("item", Kind.STRING)),
    ("id",),
)
WIDER = SourceSchema("shop.orders", (*ORDERS.columns, Column("price", Kind.INT)), ("id",))
LINES = SourceSchema("shop.lines", ORDERS.columns, ("id",))


@dataclass(frozen=True, slots=True)
class FileStore:
    """A kind of store.

    ``files`` are those that are damaged, as patterns; ``is_written``: reading it changes files.
    """

    build: Callable[[Path], None]
    read: Callable[[Path], Any]
    files: tuple[str, ...]
    is_written: bool = False
    accepts: Callable[[Any, Any], bool] = lambda found, whole: False
    """Whether something else than what was there is right as well."""


def windows(first: int, count: int) -> list[bytes]:
    """Windows with two rows each."""
    found = []
    for scn in range(first, first + count):
        builder = WindowBuilder(scn, scn * 1_000_000)
        for schema in (ORDERS, LINES):
            row = schema.encode_row((scn, "x" * (scn % 90)))
            builder.event(
                Op.INSERT, schema.source_id, schema.fingerprint, schema.encode_key((scn,)),
                after=row,
            )  # fmt: skip
        found.append(builder.end(f"t{scn}"))
    return found


# ---- a relay ------------------------------------------------------------------------------


def build_ring(folder: Path) -> None:
    """More than one lap, so that there is a pad."""
    with Ring.create(folder, RING_BYTES, clock=CLOCK) as writer:
        for number, window in enumerate(windows(1, 620)):
            writer.append(window, Position(number, 2) if number else Position(0, 0))


def read_ring(folder: Path) -> dict[str, Any]:
    """Everything in each way that a worker reads it."""
    with Ring.open_reader(folder) as ring:
        state = ring.snapshot()
        directory, extents = HeaderCache(), Extents()
        copied, listed, sent = b"", b"", b""
        at = ring.find(state.prev)
        while block := ring.read(at, 1 << 16)[0]:
            copied += block
            at = ring.read(at, 1 << 16)[1]
        at = ring.find(state.prev)
        while listing := directory.at(ring, at):
            lengths = listing.columns.length.astype(np.int64)
            listed += copy_of(listing.file.data, listing.offsets, lengths)
            at = listing.after
        at = ring.find(state.prev)
        while found := extents.at(ring, at, None):
            offset = ring.file.file_offset(found[0].start)
            sent += ring.file.view[offset : offset + found[0].size_bytes]
            at = found[0].after
        middle = state.prev.scn + 100
        found_at, time_at = ring.find(Position(middle, 1)), ring.before_time(middle * 1_000_000)
        describe_ring(folder)
        return {
            "frames": copied, "listed": listed, "sent": sent, "clock": ring.clock,
            "prev": state.prev, "max": state.max, "time": time_at,
            "found": bytes(ring.read(found_at, 1)[0]),
        }  # fmt: skip


def is_ring_of_before(found: Any, whole: Any) -> bool:
    """The state of one publication ago: what is missing of it is yet to come."""
    return bool(
        len(found["frames"]) < len(whole["frames"])
        and found["frames"] == whole["frames"][: len(found["frames"])]
        and found["prev"] == whole["prev"]
        and found["found"] == whole["found"]
    )


def relay_config(folder: Path) -> Any:
    """The configuration of the relay whose data folder is ``folder``."""
    return parse(
        f'[relay]\ndata_dir = "{folder}"\nlisten = "127.0.0.1:0"\n'
        f'[[database]]\nname = "shop"\nurl = "generator://"\nring_bytes = {RING_BYTES}\n'
    )


def build_relay(folder: Path) -> None:
    """What a fetcher leaves: ring, schemas, resume state, dumps, tables that are not followed."""
    database_folder = DatabaseFolder.of(folder, "shop")
    with Ring.create(database_folder.path, RING_BYTES, clock=CLOCK) as writer:
        registry = Registry(database_folder.registry)
        registry.announce([ORDERS, LINES, WIDER, ORDERS])
        intake = Intake(writer, registry)
        for window in windows(1, 120):
            intake.complete = intake.ring.append(window, intake.complete)
        writer.sync()
        registry.close()
    write_document(database_folder.resume_state, json.dumps({"gtid": "0-1-120"}).encode())
    book = DumpBook(database_folder.dumps)
    book.add(new_dump({"sources": ["shop.orders"], "chunk_rows": 500}))
    book.save()
    tables = TableBook(database_folder.tables)
    tables.add(TableRecord("shop.lines", CaptureState.SUSPENDED, 71, "a statement"))
    tables.write(tables.content())
    write_document(database_folder.open_window, b'{"window": 7, "after": {"scn": 6, "seq": 2}}')
    write_document(database_folder.status, b'{"state": "streaming"}', durable=False)


def read_relay(folder: Path) -> dict[str, Any]:
    """As a fetcher opens it that continues with the next window, and then a worker."""
    return asyncio.run(_read_relay(folder))


async def _read_relay(folder: Path) -> dict[str, Any]:
    database_folder = DatabaseFolder.of(folder, "shop")
    config = relay_config(folder)
    database = DatabaseView(config.database[0], database_folder, WakeupReceiver(make_wakeup()))
    state = database.fetcher_state().document.get("state")
    fetcher = Fetcher(config.database[0], folder)
    intake = fetcher._open_intake(CLOCK, Position(120, 2))
    try:
        resume_state = read_document(database_folder.resume_state)
        last = intake.complete
        read_document(database_folder.open_window)
        intake._before_open_window(Position(7, 1))
        intake.complete = intake.ring.append(windows(121, 1)[0], intake.complete)
        with Ring.open_reader(database_folder.path) as ring:
            held = ring.snapshot()
            at, frames = ring.find(held.prev), b""
            while block := ring.read(at, 1 << 16)[0]:
                frames += block
                at = ring.read(at, 1 << 16)[1]
        reader = RegistryReader(database_folder.registry)
        reader.refresh()
        return {
            "last": last, "prev": held.prev, "memo": resume_state, "frames": frames,
            "schemas": [s.fingerprint for s in reader.schemas],
            "latest": {s: _fingerprint(reader, s) for s in reader.schemas.sources},
            "dumps": [dump.to_json() for dump in fetcher.book],
            "tables": [one.to_json() for one in fetcher.tables.book],
            "state": state,
        }  # fmt: skip
    finally:
        intake.ring.close()
        intake.registry.close()
        fetcher._wakeup.close()
        database.close()


def _fingerprint(reader: RegistryReader, source: str) -> int:
    latest = reader.schemas.latest(source)
    assert latest is not None
    return latest.fingerprint


def is_shorter_ring(found: Any, whole: Any) -> bool:
    """The windows from some position on: readers before it are too old."""
    rest = {key: value for key, value in found.items() if key not in ("frames", "prev", "state")}
    at = len(whole["frames"]) - len(found["frames"])
    if rest != {key: whole[key] for key in rest} or at < 0:
        return False
    if found["state"] not in (None, whole["state"]):
        return False
    retained = list(iter_frames(whole["frames"]))
    before = [view.position for view in retained if view.offset < at]
    is_suffix = whole["frames"][at:] == found["frames"]
    return bool(is_suffix and found["prev"] == (before[-1] if before else whole["prev"]))


# ---- a client -----------------------------------------------------------------------------

CHECKPOINTS = [OnlineCheckpoint("shop", CLOCK, Position(scn, 2)) for scn in (71, 72, 73)]


def build_file(folder: Path) -> None:
    store = FileCheckpoints(folder / "shop.checkpoint")
    for checkpoint in CHECKPOINTS:
        store.save(checkpoint)
    store.close()


def read_file(folder: Path) -> str:
    store = FileCheckpoints(folder / "shop.checkpoint")
    try:
        found = store.load()
    finally:
        store.close()
    return "none" if found is None else encode(found)


def build_lmdb(folder: Path) -> None:
    for name, checkpoints in (("mirror", CHECKPOINTS), ("other", CHECKPOINTS[:1])):
        store = LmdbCheckpoints(folder / "store", name)
        for checkpoint in checkpoints:
            store.save(checkpoint)
        store.close()


def read_lmdb(folder: Path) -> list[str]:
    found = []
    for name in ("mirror", "other"):
        store = LmdbCheckpoints(folder / "store", name)
        try:
            loaded = store.load()
        finally:
            store.close()
        found.append("none" if loaded is None else encode(loaded))
    return found


# ---- a bootstrap --------------------------------------------------------------------------


def build_bootstrap(folder: Path) -> None:
    """A base, a delta and a segment, and windows in the log."""
    store = Store(folder / "shop")
    store.create()
    log = HotLog(folder / "shop" / "log")
    log.bind("shop", CLOCK, START)
    log.put_note("seeding", {name: {"state": "seeded"} for name in SOURCES})
    log.add_schemas([ORDERS, LINES, WIDER, ORDERS])
    history, blocks = History(21), []
    for _ in range(4):
        blocks.append(history.block(6))
        log.append(blocks[-1], 1)
        segments.seal(log, store, 1)
    chain = store.read().chain
    for kind, start, runs in (
        (RunKind.BASE, START, chain[:1]),
        (RunKind.DELTA, chain[1].start, chain[1:3]),
    ):
        stop = runs[-1].stop
        frames = compact(frames_between(blocks, start, stop), base=kind is RunKind.BASE)
        merged = write_run(store, kind, start, stop, frames)
        drop = runs if kind is RunKind.DELTA else ()
        store.switch(partial(_merged, merged, drop))
    for _ in range(3):
        log.append(history.block(3), 1)
    store.collect(0, "cs", now_us=1 << 60)
    log.close()


def _merged(run: Run, drop: tuple[Run, ...], manifest: Manifest) -> Manifest:
    return manifest.with_changes(add=run, drop=drop, now_us=1)


def read_bootstrap(folder: Path) -> dict[str, Any]:
    """As a server answers a new client, one in the middle, and one of a table."""
    store = Store(folder / "shop")
    log = HotLog(folder / "shop" / "log", read_only=True)
    try:
        state = log.state()
        whole = StreamFilter()
        one = StreamFilter(sources=(SOURCES[0],))
        middle = store.read().chain[-1].start
        return {
            "state": [state.database, state.clock, state.start, state.window, state.last],
            "schemas": [schema.fingerprint for schema in log.schemas()],
            "seeding": log.note("seeding"),
            "all": _answer(store, log, ORIGIN, whole),
            "rest": _answer(store, log, middle, whole),
            "table": _answer(store, log, ORIGIN, one),
            "log": log.read(state.start, state.window, 1 << 30),
        }
    finally:
        log.close()


def _answer(store: Store, log: HotLog, since: Position, chosen: StreamFilter) -> bytes:
    stream = BootstrapStream(
        store=store, log=log, since=since, target=log.state().window, stream_filter=chosen,
        source_ids=matching_ids(SOURCES, chosen),
    )  # fmt: skip
    data = b"".join(bytes(piece.frames) for piece in stream.pieces())
    for _ in iter_frames(data):  # as the client does
        pass
    return data


def check_bootstrap(folder: Path) -> dict[str, Any]:
    """``databus inspect``: what it finds is an error too."""
    from databus.bootstrap.log.log_check import describe_log

    described = describe_log(folder / "shop")
    problems = Store(folder / "shop").check()
    if problems:
        raise DatabusError("; ".join(problems))
    return {"log": described, "runs": describe(Store(folder / "shop"))}


STORES: dict[str, FileStore] = {
    "ring": FileStore(
        build_ring, read_ring, ("ring", "ring.index"), accepts=is_ring_of_before
    ),
    "relay": FileStore(
        build_relay, read_relay, ("shop/*",), is_written=True, accepts=is_shorter_ring
    ),
    "checkpoints": FileStore(
        build_file, read_file, ("shop.checkpoint",),
        accepts=lambda found, whole: found in map(encode, CHECKPOINTS),
    ),
    "checkpoints-lmdb": FileStore(build_lmdb, read_lmdb, ("store/data.mdb",)),
    "bootstrap": FileStore(
        build_bootstrap, read_bootstrap,
        ("shop/log/data.mdb", "shop/manifest.json", "shop/runs/*/*.parquet"),
    ),
    "inspect": FileStore(
        build_bootstrap, check_bootstrap,
        ("shop/log/data.mdb", "shop/manifest.json", "shop/runs/*/*.parquet"),
    ),
}  # fmt: skip
