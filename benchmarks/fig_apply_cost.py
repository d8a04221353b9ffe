"""Cost of one apply against the size of the table, and a full bootstrap against pyarrow alone.

The same number of changes (half updates, a quarter inserts, a quarter deletes) is merged by
Spark into a chain beside bases of different sizes, as the applier does by itself: the base is
left alone until its changes are a quarter of it.  So the cost of an apply must not grow with
the table.  What a rewrite of the base costs is shown beside it.

The bootstrap is served over loopback by a server process and read by one process that splits
and checks the frames; the limit is one thread that reads the same Parquet with pyarrow.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks import harness
from benchmarks.harness import Report, Run, Sample
from databus.bootstrap.log import HotLog
from databus.bootstrap.manifest import Store, new_run_id
from databus.bootstrap.runs import PARQUET, SCHEMA, RunKind, describe_file
from databus.bootstrap.runs import Run as StoredRun
from databus.bootstrap.segments import as_table, seal
from databus.common import frame
from databus.common.checkpoint import ORIGIN, Position
from databus.common.config import BootstrapConfig, Config
from databus.common.frame import FrameSplitter, Op

FRAME_BYTES = 200
KEY_BYTES = 16
GROUP_ROWS = (16 << 20) // FRAME_BYTES
FILE_ROWS = (128 << 20) // FRAME_BYTES
SOURCE = frame.source_id("shop.orders")
FLOOR_APPLY = 1.5
FLOOR_READ = 0.5


def template(op: Op) -> np.ndarray[Any, Any]:
    """A frame of FRAME_BYTES with a key of KEY_BYTES."""
    header = frame.HEADER_BYTES
    after = b"" if op is Op.DELETE else b"x" * (FRAME_BYTES - header - KEY_BYTES)
    packed = frame.pack_frame(
        op=op,
        scn=1,
        seq=0,
        source=SOURCE,
        key=b"k" * KEY_BYTES,
        after=after or None,
    )
    return np.frombuffer(packed, dtype=np.uint8)


def frames(keys: np.ndarray[Any, Any], scn: int, first_seq: int, op: Op, payload: int) -> bytes:
    """One frame a key, at (scn, first_seq ..); every CRC is right."""
    from google_crc32c import value

    one = template(op)
    rows = np.tile(one, (len(keys), 1))
    header = frame.HEADER_BYTES
    count = len(keys)
    rows[:, 16:24] = np.frombuffer(np.full(count, scn, "<u8").tobytes(), np.uint8).reshape(-1, 8)
    seqs = np.arange(first_seq, first_seq + count, dtype="<u4")
    rows[:, 24:28] = np.frombuffer(seqs.tobytes(), np.uint8).reshape(-1, 4)
    hashes = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype("<u8")
    rows[:, 32:40] = np.frombuffer(hashes.tobytes(), np.uint8).reshape(-1, 8)
    rows[:, header : header + 8] = np.frombuffer(keys.astype("<u8").tobytes(), np.uint8).reshape(
        -1, 8
    )
    if op is not Op.DELETE:
        # As compressible as text in columns is: 32 letters at random, no word twice.
        rng = np.random.default_rng(payload + int(keys[0]) if len(keys) else 0)
        rows[:, header + KEY_BYTES :] = rng.integers(
            97, 129, (count, rows.shape[1] - header - KEY_BYTES), dtype=np.uint8
        )
    for row in rows:
        crc = value(row[4:].tobytes())
        row[0:4] = np.frombuffer(np.uint32(crc).tobytes(), np.uint8)
    return rows.tobytes()


def make_base(store: Store, rows: int) -> Position:
    """A base of ``rows`` rows as the applier writes it; returns where it ends."""
    stop = Position(rows // GROUP_ROWS + 10, 1 << 20)
    run_id = new_run_id(RunKind.BASE, stop)
    folder = store.run_folder(run_id)
    folder.mkdir(parents=True)
    files = []
    # The first group's frames are shifted to new keys and positions: packing is not measured.
    made = 0
    while made < rows:
        name = f"part-{len(files):05d}.parquet"
        writer = pq.ParquetWriter(folder / name, SCHEMA, **PARQUET)
        with contextlib.closing(writer):
            in_file = 0
            while made < rows and in_file < FILE_ROWS:
                count = min(GROUP_ROWS, rows - made)
                keys = np.arange(made, made + count)
                data = frames(keys, 1 + made // GROUP_ROWS, 0, Op.INSERT, 1)
                writer.write_table(as_table(data, frame.scan(data, verify=False)))
                made += count
                in_file += count
        files.append(describe_file(folder / name))
    base = StoredRun(
        id=run_id,
        kind=RunKind.BASE,
        start=ORIGIN,
        stop=stop,
        files=tuple(files),
        created_us=1,
    )
    store.switch(lambda manifest: manifest.with_changes(add=base, now_us=1))
    return stop


def write_changes(log: HotLog, store: Store, rows: int, changes: int, scn: int) -> None:
    """``changes`` changes to a table of ``rows`` rows, in four segments."""
    rng = np.random.default_rng(scn)
    part = changes // 4
    for number in range(4):
        at = scn + number
        updated = rng.choice(rows, part // 2, replace=False)
        deleted = rng.choice(rows, part // 4, replace=False)
        inserted = rows + np.arange(part // 4) + part * at
        block = b"".join(
            [
                frames(updated, at, 0, Op.UPDATE, at),
                frames(deleted, at, len(updated), Op.DELETE, at),
                frames(inserted, at, len(updated) + len(deleted), Op.INSERT, at),
                frame.pack_frame(
                    op=Op.END_OF_WINDOW,
                    scn=at,
                    seq=len(updated) + len(deleted) + len(inserted),
                    key=b"t",
                    after=bytes(4),
                ),
            ]
        )
        log.append(block, 1, verify=False)
        seal(log, store, 1)


def apply_cost(run: Run, report: Report, folder: Path, sizes: list[int], changes: int) -> Path:
    """Measure an apply beside each base, and a rewrite of it; returns the last store."""
    from databus.bootstrap import planner
    from databus.bootstrap.applier import Applier, start_spark
    from databus.bootstrap.planner import Merge

    spark = start_spark("local[2]", "2g")
    medians = {}
    store = Store(folder)
    try:
        for position, rows in enumerate(sizes):
            store = Store(folder / str(rows) / "shop")
            store.create()
            log = HotLog(store.folder / "log")
            end = make_base(store, rows)
            log.bind("shop", "clock", end)
            log.put_note("seeding", {"shop.orders": {"state": "seeded"}})
            applier = Applier(store, spark, grace_us=0)
            seconds = []
            for turn in range(run.repeats + 1):
                write_changes(log, store, rows, changes, end.scn + 1 + 4 * turn)
                chain = store.read().chain[-4:]
                assert len(chain) == 4
                began_s = time.perf_counter()
                applier._merge(Merge(chain, RunKind.DELTA))
                seconds.append(time.perf_counter() - began_s)
            measured = seconds[1:]  # the first warms the Java machine up
            report.add(Sample(tuple(measured)), series="apply", rows=rows, changes=changes)
            medians[rows] = Sample(tuple(measured)).median
            if not run.smoke or position == len(sizes) - 1:
                manifest = store.read()
                merge = planner.next_merge(manifest, 1 << 40, full=True)
                while merge is not None and merge.kind is not RunKind.BASE:
                    applier._merge(merge)
                    merge = planner.next_merge(store.read(), 1 << 40, full=True)
                if merge is not None:
                    began_s = time.perf_counter()
                    applier._merge(merge)
                    rewrite = Sample((time.perf_counter() - began_s,))
                    report.add(rewrite, series="rewrite of the base", rows=rows, changes=changes)
            log.close()
            if rows != sizes[-1]:
                shutil.rmtree(folder / str(rows))
    finally:
        spark.stop()
    least, most = sizes[0], sizes[-1]
    ratio = medians[most] / medians[least]
    report.note(
        f"an apply of {changes:,} changes at {most:,} rows costs {ratio:.2f} of one at "
        f"{least:,} rows; the floor is {FLOOR_APPLY}"
    )
    report.settings["apply_ratio"] = ratio
    return store.folder


@contextlib.contextmanager
def server(data_dir: Path) -> Iterator[int]:
    """A bootstrap server process over the store; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    section = BootstrapConfig(listen=f"127.0.0.1:{port}", data_dir=data_dir, databases=("shop",))
    code = (
        "import sys; from databus.bootstrap import run_server; "
        "from databus.common.config import Config; "
        "run_server(Config.model_validate_json(sys.argv[1]))"
    )
    document = Config(bootstrap=section).model_dump_json()
    child = subprocess.Popen([sys.executable, "-c", code, document])
    try:
        deadline_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
                break
            if time.monotonic() > deadline_s:
                raise TimeoutError("the server does not come up")
            time.sleep(0.05)
        yield port
    finally:
        child.terminate()
        child.wait(30)


def read_over_http(port: int) -> tuple[float, int, int, str]:
    """One full bootstrap: seconds, rows, bytes, and a hash of the order of its positions."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began_s = time.perf_counter()
    connection.request(
        "GET", "/v1/shop/bootstrap", headers={"Accept": "application/vnd.databus.frames"}
    )
    answer = connection.getresponse()
    splitter = FrameSplitter()
    rows = size = 0
    digest = hashlib.sha256()
    while data := answer.read1(1 << 20):
        whole = splitter.feed(data)
        if whole:
            columns = frame.scan(whole, verify=False)
            is_row = columns.op < frame.FIRST_CONTROL_OP
            rows += int(is_row.sum())
            size += len(whole)
            digest.update(columns.scn[is_row].tobytes())
            digest.update(columns.seq[is_row].tobytes())
    seconds = time.perf_counter() - began_s
    connection.close()
    return seconds, rows, size, digest.hexdigest()[:16]


def read_with_pyarrow(store: Store) -> float:
    """Seconds that one thread takes to read every column of the base's files."""
    base = store.read().base
    assert base is not None
    began_s = time.perf_counter()
    for file in base.files:
        with pq.ParquetFile(store.run_folder(base) / file.name) as opened:
            for index in range(opened.metadata.num_row_groups):
                opened.read_row_group(index, columns=["frame"], use_threads=False)
    return time.perf_counter() - began_s


def bootstrap_read(run: Run, report: Report, folder: Path) -> None:
    """Measure a full bootstrap of the store against reading it."""
    store = Store(folder)
    base = store.read().base
    assert base is not None
    with server(folder.parent) as port:
        read_over_http(port)
        found = [read_over_http(port) for _ in range(run.repeats)]
    limit = Sample(tuple(base.rows / read_with_pyarrow(store) for _ in range(run.repeats)))
    served = Sample(tuple(rows / seconds for seconds, rows, _, _ in found))
    size = Sample(tuple(size / seconds / 1e6 for seconds, _, size, _ in found))
    report.add(served, series="bootstrap, rows/s", rows=base.rows)
    report.add(size, series="bootstrap, MB/s", rows=base.rows)
    report.add(limit, series="pyarrow alone, rows/s", rows=base.rows)
    ratio = served.median / limit.median
    report.settings["read_ratio"] = ratio
    report.output_hash = found[0][3]
    report.note(
        f"a full bootstrap runs at {ratio:.2f} of pyarrow reading the frame column alone in one "
        f"thread; the floor is {FLOOR_READ}"
    )


def main(run: Run, sizes: list[int], changes: int) -> None:
    """Measure and report."""
    report = Report(run, "Cost of an apply by table size; a full bootstrap", "s, or as said")
    report.settings = {"sizes": sizes, "changes": changes, "frame_bytes": FRAME_BYTES}
    folder = Path(tempfile.mkdtemp(prefix="databus-apply-"))
    try:
        last = apply_cost(run, report, folder, sizes, changes)
        bootstrap_read(run, report, last)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.write()


def options() -> tuple[list[int], int]:
    """``--sizes`` and ``--changes``, taken off the command line; small ones for ``--smoke``."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--sizes", default="")
    parser.add_argument("--changes", type=int, default=0)
    given, rest = parser.parse_known_args()
    smoke = "--smoke" in rest
    sys.argv[1:] = rest
    sizes = given.sizes or ("2000,20000" if smoke else "1000000,5000000,20000000")
    return [int(size) for size in sizes.split(",")], given.changes or (400 if smoke else 500_000)


if __name__ == "__main__":
    sizes, changes = options()
    main(harness.start("fig_apply_cost", __doc__.partition("\n")[0]), sizes, changes)
