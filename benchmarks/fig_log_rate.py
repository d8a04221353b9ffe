"""How fast the log writer takes a filled ring, beside a reader that receives only.

A relay in processes of its own has filled its ring with events of 200 bytes or of 2.5 KB.
``databus bootstrap`` without an applier follows it from the oldest event; its log is in a folder of
its own, synced and sealed as in production.  The clock runs from a tenth of the events to the last
one, so that the start of the processes does not count.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fig_13_relay_throughput import WHOLE_RING, poll
from benchmarks.harness import Report, Run, Sample, start
from benchmarks.loopback import read_bytes
from benchmarks.relay_process import RelayProcess
from databus.cli.demo.guardian import Guardian
from databus.cli.demo.private_servers import free_port
from databus.common.frame import frame_format

EVENT_BYTES = (200, 2500)
EVENTS_PER_WINDOW = 10
RING_BYTES = 1 << 28
LIMIT_S = 300
POLL_S = 0.02


@contextlib.contextmanager
def log_writer(relay: str) -> Iterator[str]:
    """A bootstrap server over an empty folder; its URL."""
    with tempfile.TemporaryDirectory(prefix="databus-bench-") as folder:
        port = free_port()
        config = Path(folder) / "databus.toml"
        config.write_text(
            f'[bootstrap]\nlisten = "127.0.0.1:{port}"\ndata_dir = "{folder}/bootstrap"\n'
            f'relays = ["{relay}"]\ndatabases = ["gen"]\n'
        )
        command = "from databus.cli.main import app; app()"
        arguments = ["bootstrap", "--no-apply", "-c", str(config)]
        process = subprocess.Popen(
            [sys.executable, "-c", command, *arguments], start_new_session=True
        )
        guardian = Guardian(process.pid, group=True)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)
            guardian.release()


def logged_scn(url: str) -> int:
    """How far the log is; 0 before it has begun."""
    with contextlib.suppress(OSError, KeyError, IndexError):
        with urllib.request.urlopen(f"{url}/v1/status", timeout=5) as answer:
            return int(json.loads(answer.read())["databases"][0]["log"]["checkpoint"]["scn"])
    return 0


def windows_per_s(url: str, first_scn: int, last_scn: int) -> float:
    """Windows a second from ``first_scn`` on until the log has ``last_scn``.

    Raises:
        TimeoutError: it has not after ``LIMIT_S``.
    """
    deadline_s = time.perf_counter() + LIMIT_S
    began: tuple[float, int] | None = None
    while time.perf_counter() < deadline_s:
        scn, now_s = logged_scn(url), time.perf_counter()
        if began is None and scn >= first_scn:
            began = now_s, scn
        if began is not None and scn >= last_scn:
            return (scn - began[1]) / max(now_s - began[0], POLL_S)
        time.sleep(POLL_S)
    raise TimeoutError(f"the log is at {scn} of {last_scn} after {LIMIT_S} s")


def main(run: Run) -> None:
    """Measure and report."""
    report = Report(run, "From a filled ring into the log", "events/s")
    ring_bytes = (16 << 20) if run.smoke else RING_BYTES
    report.settings = {"ring_bytes": ring_bytes, "events_per_window": EVENTS_PER_WINDOW}
    for event_bytes in EVENT_BYTES:
        events = int(0.8 * ring_bytes) // (event_bytes + 10)
        payload = max(1, event_bytes - frame_format.HEADER_BYTES - 20)
        last_scn = events // EVENTS_PER_WINDOW
        source = (
            f"generator://?events_per_second=max&payload_bytes={payload}&keys=100000&seed={run.seed}"
            f"&events_per_window={EVENTS_PER_WINDOW}&events={last_scn * EVENTS_PER_WINDOW}"
        )
        with RelayProcess(source, ring_bytes, until_scn=last_scn) as relay:
            rates = []
            for _ in range(run.repeats):
                with log_writer(relay.url) as url:
                    rates.append(windows_per_s(url, last_scn // 10, last_scn) * EVENTS_PER_WINDOW)
            sent = read_bytes(1, 0.5, poll, relay.port, (0, last_scn), last_scn, WHOLE_RING, 0.0)
        sample = Sample(tuple(rates))
        report.add(sample, series="log writer", event_bytes=event_bytes)
        report.note(
            f"{event_bytes} B: {sample.median * event_bytes / 1e6:,.0f} MB/s into the log, "
            f"{sample.median * event_bytes / sent:.2f} of what one reader receives"
        )
    report.output_hash = str(ring_bytes)
    report.write()


if __name__ == "__main__":
    main(start("fig_log_rate", __doc__.partition("\n")[0]))
