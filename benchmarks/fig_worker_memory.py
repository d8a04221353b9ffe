"""A worker's memory while its ring is written over a hundred times and more.

A relay with a small ring and a source that fills it several times a second; readers of every
kind run all the while: followers of everything, of a partition, by a predicate in NDJSON, and
polls from the oldest event on, which the writer overtakes now and then.  What the worker grows
by from the tenth ring length to the last is printed.  The floor: nothing, but for noise.
"""

from __future__ import annotations

import multiprocessing as mp
import socket
import threading
import time
from urllib.parse import quote

from benchmarks.harness import Report, Run, Sample, start
from benchmarks.relay_process import RelayProcess, anonymous_bytes

RING_BYTES = 16 << 20
EVENT_BYTES = 2500
EVENTS_PER_SECOND = 20_000
WARM_LAPS = 10
READERS = {
    "followers": "start=latest&follow=true&format=frames",
    "followers of a partition": "start=latest&follow=true&format=frames&partition=mod:16:3",
    "followers by a predicate": "start=latest&follow=true&format=ndjson&where="
    + quote("id % 64 = 7"),
    "polls of the whole ring": "start=oldest&format=frames",
    "polls of a partition": "start=oldest&format=frames&partition=mod:16:5",
}


def read_for_ever(port: int, query: str) -> None:
    """Ask, take what comes, and ask again when the answer ends."""
    buffer = bytearray(1 << 18)
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(
                    f"GET /v1/gen/stream?{query} HTTP/1.0\r\nHost: here\r\n\r\n".encode()
                )
                while connection.recv_into(buffer):
                    pass
        except OSError:
            time.sleep(0.01)


def _read_all(port: int) -> None:
    threads = [
        threading.Thread(target=read_for_ever, args=(port, query), daemon=True)
        for query in READERS.values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(run: Run) -> None:
    """Measure and report."""
    laps = 3 if run.smoke else 100
    warm_laps = 1 if run.smoke else WARM_LAPS
    report = Report(run, "Memory of a worker over many ring lengths", "MiB")
    report.settings = {
        "ring_bytes": RING_BYTES, "laps": laps, "events_per_second": EVENTS_PER_SECOND,
        "readers": list(READERS),
    }  # fmt: skip
    report.output_hash = "none: what is read is thrown away"
    source = (
        f"generator://?events_per_second={EVENTS_PER_SECOND}&payload_bytes={EVENT_BYTES}"
        f"&events_per_window=10&keys=100000&seed={run.seed}"
    )
    with RelayProcess(source, RING_BYTES, until_scn=1) as relay:
        readers = mp.get_context("fork").Process(target=_read_all, args=(relay.port,), daemon=True)
        readers.start()
        try:
            found = []
            for lap in range(warm_laps, warm_laps + laps + 1, max(1, laps // 10)):
                _wait_for(relay, lap)
                found.append(anonymous_bytes(relay.worker()) / (1 << 20))
                report.add(Sample((found[-1],)), series="worker", laps=lap)
            served = relay.status()["served"]
        finally:
            readers.kill()
            readers.join()
    report.note(f"from lap {warm_laps} to {lap}: {found[-1] - found[0]:+.1f} MiB")
    report.note(f"sent meanwhile: {served['bytes'] / 1e6:,.0f} MB, {served['requests']} requests")
    report.write()


def _wait_for(relay: RelayProcess, lap: int) -> None:
    deadline = time.monotonic() + 300
    while relay.status()["ring"]["written_bytes"] < lap * RING_BYTES:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ring was not written {lap} times")
        time.sleep(0.1)


if __name__ == "__main__":
    main(start("fig_worker_memory", __doc__.partition("\n")[0]))
