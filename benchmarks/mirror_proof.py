"""``databus mirror`` under a steady load, with its driver killed, against what was written.

One client writes 2,000 changes a second into a table of a private MariaDB or PostgreSQL: inserts,
updates and deletes of a few thousand keys, twenty a transaction.  Each transaction follows from its
number, which it also writes into row 0.  So a state of the table in the lake names the transaction
that it must equal, and the state of each transaction can be computed without any part of Databus.

The driver is killed with SIGKILL at even intervals and started again.  At the end ten states of the
lake (all, if there are fewer) over the whole run are compared, and the newest with the source.  The
lag is the age of the oldest transaction that a commit of the lake brings.

It is a proof and no figure: it fails if a state differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from benchmarks.harness import Report, Run, Sample, start
from benchmarks.upstreams import MariaDB, Postgres, Upstream
from databus.cli.demo.guardian import Guardian
from databus.cli.demo.private_servers import free_port
from databus.client.exports.iceberg_table import open_catalog

CHANGES = 20
"""Changes of a transaction, the one of row 0 among them."""
KEYS = 5000
STATES = 10
WAIT_S = 400
Rows = dict[int, tuple[int, str]]
COMMAND = "from databus.cli.main import app; app()"


@dataclass(frozen=True, slots=True)
class LakeState:
    """A version of the table in the lake: its SCN, when it was committed, and its rows."""

    scn: int
    at_s: float
    rows: Rows

    @property
    def number(self) -> int:
        """The transaction that it shows."""
        return self.rows[0][0] if self.rows else 0


def changes_of(number: int) -> tuple[Rows, list[int]]:
    """What a transaction writes, and the keys that it deletes."""
    rng = random.Random(number)
    keys = rng.sample(range(1, KEYS), CHANGES - 1)
    gone = [key for key in keys if rng.random() < 0.2]
    written = {key: (number, f"value {rng.random()}") for key in keys if key not in gone}
    return {0: (number, "")} | written, gone


def states_at(numbers: list[int]) -> dict[int, Rows]:
    """The table after each of these transactions."""
    found: dict[int, Rows] = {}
    rows: Rows = {}
    for number in range(1, max(numbers) + 1):
        written, gone = changes_of(number)
        rows.update(written)
        for key in gone:
            rows.pop(key, None)
        if number in numbers:
            found[number] = dict(rows)
    return found


@dataclass
class Writer:
    """Writes the transactions at a rate, in a thread of its own."""

    upstream: Upstream
    per_s: float
    committed_s: list[float] = field(default_factory=lambda: [0.0])
    _ended: threading.Event = field(default_factory=threading.Event)

    def write(self) -> None:
        """Until ``stop``."""
        is_mariadb = isinstance(self.upstream, MariaDB)
        upsert = (
            "ON DUPLICATE KEY UPDATE number = VALUES(number), v = VALUES(v)"
            if is_mariadb
            else "ON CONFLICT (id) DO UPDATE SET number = EXCLUDED.number, v = EXCLUDED.v"
        )
        began_s = time.monotonic()
        with contextlib.closing(self.upstream.server.connect("bench")) as connection:
            cursor = connection.cursor()
            while not self._ended.is_set():
                number = len(self.committed_s)
                written, gone = changes_of(number)
                values = ", ".join(f"({key}, {n}, '{v}')" for key, (n, v) in written.items())
                cursor.execute("BEGIN")
                cursor.execute(f"INSERT INTO item (id, number, v) VALUES {values} {upsert}")
                if gone:
                    cursor.execute(f"DELETE FROM item WHERE id IN ({', '.join(map(str, gone))})")
                cursor.execute("COMMIT")
                self.committed_s.append(time.time())
                due_s = began_s + number * CHANGES / self.per_s
                self._ended.wait(max(0.0, due_s - time.monotonic()))

    def stop(self) -> None:
        """End after the transaction that is being written."""
        self._ended.set()


def main(run: Run) -> None:
    """Prove each database with each format."""
    options = run.options
    report = Report(run, "A mirror under load, with its driver killed", "s")
    report.settings = vars(options) | {"out": str(run.out)}
    digest = hashlib.sha256()
    for database in options.databases.split(","):
        for form in options.formats.split(","):
            upstream = MariaDB() if database == "mariadb" else Postgres()
            with upstream, tempfile.TemporaryDirectory(prefix="databus-bench-") as folder:
                _proof(run, report, upstream, form, Path(folder))
            digest.update(f"{database} {form}".encode())
    report.output_hash = digest.hexdigest()[:16]
    report.write()


def _proof(run: Run, report: Report, upstream: Upstream, form: str, folder: Path) -> None:
    options = run.options
    seconds, kills = (40.0, 1) if run.smoke else (options.seconds, options.kills)
    upstream.execute("CREATE TABLE item (id BIGINT PRIMARY KEY, number BIGINT, v VARCHAR(64))")
    config = _config(upstream, folder)
    lake = folder / "lake"
    mirror = [
        "mirror", "-c", str(config), "--format", form, "--to", str(lake),
        "--every", f"{options.every}s", "--master", "local[2]",
    ]  # fmt: skip
    writer = Writer(upstream, options.per_s)
    thread = threading.Thread(target=writer.write)
    killed_s: list[float] = []
    with _process("relay", "-c", str(config)), _process("bootstrap", "-c", str(config)):
        _wait_ready(config)
        driver = _started(mirror)
        thread.start()
        try:
            _wait(lambda: len(_states(form, lake, upstream)) > 1, "two commits of the mirror")
            for _ in range(kills):
                time.sleep(seconds / (kills + 1))
                driver.kill()
                killed_s.append(time.time())
                driver.wait()
                driver = _started(mirror)
            time.sleep(seconds / (kills + 1))
            writer.stop()
            thread.join()
            last = len(writer.committed_s) - 1
            _wait(lambda: _states(form, lake, upstream)[-1].number == last, f"transaction {last}")
        finally:
            writer.stop()
            driver.kill()
            driver.wait()
    _compare(report, upstream, form, _states(form, lake, upstream), writer, killed_s)


def _compare(
    report: Report,
    upstream: Upstream,
    form: str,
    found: list[LakeState],
    writer: Writer,
    killed_s: list[float],
) -> None:
    """Compare states, and report the lag.

    Raises:
        AssertionError: a state differs.
    """
    every = sorted({at * (len(found) - 1) // STATES for at in range(1, STATES + 1)})
    chosen = [found[at] for at in every]
    expected = states_at([state.number for state in chosen])
    for state in chosen:
        assert state.rows == expected[state.number], f"{form} at scn {state.scn} differs"
    source = {
        key: (number, v) for key, number, v in upstream.execute("SELECT id, number, v FROM item")
    }
    assert found[-1].rows == source, f"{form}: the newest state differs from the source"
    lags, undisturbed = [], []
    for before, after in itertools.pairwise(found):
        if before.number < after.number:
            lags.append(after.at_s - writer.committed_s[before.number + 1])
            if not any(writer.committed_s[before.number + 1] <= k <= after.at_s for k in killed_s):
                undisturbed.append(lags[-1])
    labels = {"database": upstream.name, "format": form}
    report.add(Sample(tuple(undisturbed)), series="lag, no kill meanwhile", **labels)
    report.add(Sample(tuple(lags)), series="lag", **labels)
    spent_s = writer.committed_s[-1] - writer.committed_s[1]
    count = len(writer.committed_s) - 1
    scns = ", ".join(str(state.scn) for state in chosen)
    report.note(
        f"{upstream.name}, {form}: {count * CHANGES / spent_s:,.0f} changes/s for {spent_s:.0f} s, "
        f"{len(killed_s)} kills, {len(found)} commits; equal at the SCNs {scns}, the last also to "
        f"the source; lag at most {max(undisturbed, default=0):.1f} s, {max(lags):.1f} s with kills"
    )


def _config(upstream: Upstream, folder: Path) -> Path:
    """A relay and a bootstrap server over the database."""
    relay, bootstrap = free_port(), free_port()
    config = folder / "databus.toml"
    config.write_text(
        f'[relay]\nlisten = "127.0.0.1:{relay}"\ndata_dir = "{folder}/relay"\n'
        f'[[database]]\nname = "shop"\nurl = "{upstream.server.url("bench")}"\n'
        f'ring_bytes = "64MiB"\n'
        f'[bootstrap]\nlisten = "127.0.0.1:{bootstrap}"\ndata_dir = "{folder}/bootstrap"\n'
        f'relays = ["http://127.0.0.1:{relay}"]\nmerge_with = "process"\n'
    )
    return config


def _wait_ready(config: Path) -> None:
    ports = [line.rpartition(":")[2].strip('"') for line in config.read_text().splitlines()
             if line.startswith("listen")]  # fmt: skip

    def is_ready() -> bool:
        with contextlib.suppress(OSError):
            for port in ports:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10).close()
            return True
        return False

    _wait(is_ready, "the servers")


def _states(form: str, lake: Path, upstream: Upstream) -> list[LakeState]:
    """The versions of the table in the lake, the oldest first."""
    name, found = f"{upstream.schema}.item", []
    if form == "delta":
        with contextlib.suppress(Exception):  # not there yet
            table = DeltaTable(str(lake / "shop" / name))
            for one in reversed(table.history()):
                if "databus.scn" in one:
                    table.load_as_version(one["version"])
                    rows = _rows(table.to_pyarrow_table())
                    found.append(LakeState(int(one["databus.scn"]), one["timestamp"] / 1e3, rows))
        return found
    with contextlib.suppress(Exception):
        loaded = open_catalog(lake / "shop").load_table(name)
        for snapshot in loaded.snapshots():
            assert snapshot.summary is not None
            scn = int(snapshot.summary.additional_properties["databus.scn"])
            rows = _rows(loaded.scan(snapshot_id=snapshot.snapshot_id).to_arrow())
            found.append(LakeState(scn, snapshot.timestamp_ms / 1e3, rows))
    return found


def _rows(table: Any) -> Rows:
    rows = {row["id"]: (row["number"], row["v"]) for row in table.to_pylist()}
    assert len(rows) == table.num_rows, "a key is there twice"
    return rows


def _started(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[None]:
    process = _started(list(arguments))
    guardian = Guardian(process.pid, group=True)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
        guardian.release()


def _wait(is_done: Any, what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {what} within {WAIT_S} s")
        time.sleep(1.0)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--databases", default="mariadb,postgres")
    parser.add_argument("--formats", default="delta,iceberg")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the load, with the kills")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two triggers")
    parser.add_argument("--per-s", type=float, default=2000.0, help="changes a second")
    parser.add_argument("--kills", type=int, default=5)


if __name__ == "__main__":
    main(start("mirror_proof", __doc__.partition("\n")[0], _options))
