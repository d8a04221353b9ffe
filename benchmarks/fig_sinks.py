"""How fast a sink takes rows from a filled ring, beside the target's own bulk load.

A worker in a process of its own serves a ring of rows of ten columns, a thousand a commit.  For
each kind of target, in turns: the target's own bulk load of the same rows, prepared beforehand,
into a table with the same key; and a sink that reads the ring from its beginning to its end.
Rates are by the clock.  Processor time is that of the loading process and of the target's server.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.broker_places import KafkaPlace, NatsPlace, RedisHashesPlace, RedisStreamsPlace
from benchmarks.fig_client_callback import row, served_ring
from benchmarks.harness import Report, Run, measure_in_turns, ratio, start
from benchmarks.sink_places import DuckdbPlace, MariaDBPlace, Place, PostgresPlace, SqlitePlace
from databus.client.sinks import Sink, SinkProcess
from databus.client.sinks.sink_kinds import sink_of
from databus.common.checkpoint import Checkpoint
from databus.common.sink_config import SinkConfig

FLOOR = 0.5
PER_COMMIT = 1000
PLACES: dict[str, type[Place]] = {
    one.kind: one
    for one in (
        SqlitePlace, DuckdbPlace, PostgresPlace, MariaDBPlace,
        RedisHashesPlace, RedisStreamsPlace, NatsPlace, KafkaPlace,
    )
}  # fmt: skip


class EndingProcess(SinkProcess):
    """Stops at the checkpoint of the last commit."""

    def __init__(self, config: SinkConfig, sink: Sink, last_scn: int) -> None:
        super().__init__(config, sink)
        commit = sink.commit

        def look(checkpoint: Checkpoint) -> None:
            if checkpoint.position.scn >= last_scn:
                threading.Thread(target=self.stop).start()

        def committed(checkpoint: Checkpoint) -> None:
            commit(checkpoint)
            look(checkpoint)

        async def committed_async(checkpoint: Checkpoint) -> None:
            await commit(checkpoint)  # type: ignore[misc]  # it is a coroutine function
            look(checkpoint)

        is_async = inspect.iscoroutinefunction(commit)
        sink.commit = committed_async if is_async else committed  # type: ignore[method-assign]  # it notices the end


def mirror(relay: str, section: dict[str, Any], last_scn: int, batch_rows: int) -> None:
    """Read the whole ring into the target."""
    config = SinkConfig.model_validate(
        {
            "name": "mirror", "database": "bench", "relays": [relay], "start": "oldest",
            "batch_rows": batch_rows, **section,
        }
    )  # fmt: skip
    EndingProcess(config, sink_of(config), last_scn).run()


def main(run: Run) -> None:
    """Measure and report."""
    rows = 3000 if run.smoke else run.options.rows
    kinds = run.options.targets if not run.smoke else ["sqlite", "duckdb"]
    report = Report(run, "Sinks, filled ring, ten columns", "rows/s")
    report.settings = {"rows": rows, "per_commit": PER_COMMIT, "floor": FLOOR}
    prepared = [row(number) for number in range(1, rows + 1)]
    with served_ring(rows, PER_COMMIT) as relay:
        for kind in kinds:
            with _place(kind, prepared) as place:
                cpu: dict[str, list[float]] = {"bulk": [], "mirror": []}

                def timed(
                    name: str, once: Callable[[], None], place: Place = place,
                    cpu: dict[str, list[float]] = cpu,
                ) -> float:  # fmt: skip
                    place.empty()
                    cpu_before_s, before_s = place.cpu_s(), time.perf_counter()
                    once()
                    took_s = time.perf_counter() - before_s
                    cpu[name].append(place.cpu_s() - cpu_before_s)
                    return rows / took_s

                def mirrored(place: Place = place) -> None:
                    mirror(relay, place.section, rows // PER_COMMIT, run.options.batch_rows)
                    assert place.count() == rows

                found = measure_in_turns(
                    run,
                    {
                        "bulk": lambda timed=timed, place=place: timed("bulk", place.load),
                        "mirror": lambda timed=timed, mirrored=mirrored: timed("mirror", mirrored),
                    },
                )
                for name, sample in found.items():
                    report.add(sample, series=f"{kind}, {name}")
                spent = {name: min(values) / rows * 1e6 for name, values in cpu.items()}
                floor = f" (floor {FLOOR})" if "sql" in place.section else ""
                report.note(
                    f"{kind}: {ratio(found['mirror'], found['bulk']):.2f} of its own bulk load by "
                    f"the clock{floor}; processor time {spent['mirror']:.1f} us a row, "
                    f"bulk load {spent['bulk']:.1f}: {spent['bulk'] / spent['mirror']:.2f}"
                )
    report.output_hash = f"{rows}"
    report.write()


@contextlib.contextmanager
def _place(kind: str, rows: list[tuple[Any, ...]]) -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="databus-bench-"))
    if kind == "postgres":
        folder.chmod(0o755)
    place = PLACES[kind](folder, rows)
    try:
        yield place
    finally:
        place.close()
        shutil.rmtree(folder, ignore_errors=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be measured in part."""
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch-rows", type=int, default=10_000)
    parser.add_argument(
        "--targets", type=lambda text: text.split(","), default=list(PLACES), help="such as duckdb"
    )


if __name__ == "__main__":
    main(start("fig_sinks", __doc__.partition("\n")[0], add_options))
