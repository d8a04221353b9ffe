"""The bootstrap server's operations page in a real browser, over a real store."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

from databus.bootstrap.http.bootstrap_server import serve_bootstrap
from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.segments import seal
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.bootstrap.runs.apply_progress import NOTE
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.common.config import BootstrapConfig
from databus.common.http.listening_socket import listening_socket
from tests.bootstrap.model import CLOCK, SOURCES, START, History, compact, frames_of, write_run
from tests.integration.test_status_page import NEEDS_CHROMIUM, rendered
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), NEEDS_CHROMIUM]

RECORD = {
    "kind": "base",
    "tier": 2,
    "start": START.to_json(),
    "rows_in": 1234,
    "rows_out": 99,
    "bytes_in": 5 << 20,
    "bytes_out": 700,
    "seconds": 1.25,
}


def filled(config: BootstrapConfig, log: HotLog) -> tuple[str, str, str]:
    """A database with a base, a segment, a gap and a table that cannot be read.

    Returns the log's oldest position, the snapshot's, and the newest.
    """
    now_us = time.time_ns() // 1000
    store = Stores(config).store("shop")
    store.create()
    history = History(3)
    log.bind("shop", CLOCK, START)
    log.append(history.block(30), now_us)
    segment = seal(log, store, now_us)
    assert segment is not None
    rows = compact(list(frames_of(store, segment)), base=True)
    base = write_run(store, RunKind.BASE, START, segment.stop, rows)
    record = {**RECORD, "run": base.id, "stop": base.stop.to_json(), "finished_us": now_us}
    store.switch(lambda m: m.with_changes(add=base, now_us=now_us).with_apply(record))
    log.append(history.block(10), now_us)
    states: dict[str, dict[str, object]] = {name: {"state": "seeded"} for name in SOURCES}
    unread = "holds 'many' <script>document.title='taken'</script>"
    states[SOURCES[0]] = {
        "state": "dumping", "dump": "1", "rows": 4321, "tries": 2, "error": unread,
    }  # fmt: skip
    log.put_note("seeding", states)
    lost = {"from": {"scn": 3, "seq": 1}, "to": {"scn": 8, "seq": 2}, "at_us": now_us}
    log.put_note("gaps", [{**lost, "bridged": True}])
    log.put_note("writer", {"state": "running", "at_us": now_us + 3600 * 10**6})
    merging = {"state": "merging", "kind": "delta", "runs": 7, "rows_in": 5000, "bytes_in": 9}
    at = {"at_us": now_us + 3600 * 10**6, "tasks_done": 3, "tasks": 4}
    store.storage.write_note(NOTE, json.dumps({**merging, **at}).encode())
    return str(START), str(base.stop), str(history.position)


async def test_the_page_shows_range_runs_seeding_gaps_and_merges(tmp_path: Path) -> None:
    config = BootstrapConfig(data_dir=tmp_path / "data", listen="127.0.0.1:0", relays=())
    logs = OpenLogs()
    log = logs.to_write(tmp_path / "data" / "shop" / "log")
    oldest, snapshot, newest = filled(config, log)
    listener = listening_socket(config.listen)
    url = "http://{}:{}".format(*listener.getsockname()[:2])
    stop = asyncio.Event()
    serving = asyncio.create_task(serve_bootstrap(config, listener, stop, logs))

    async def shown() -> str:
        page = await rendered(f"{url}/status", tmp_path / "profile")
        assert "Loading" not in page
        assert f"newest {newest}" in page
        return page

    try:
        page = await eventually(shown, 150)
    finally:
        stop.set()
        await serving
        logs.close()
    text = re.sub(r"<script>.*?</script>|<style>.*?</style>", "", page, flags=re.DOTALL)
    assert re.search(r"<h2>shop</h2><span class=\"state warn\">seeding</span>", text)
    assert f"oldest {oldest}" in text and f"snapshot {snapshot}" in text
    assert '<dt>log writer</dt><dd><span class="state good">running</span></dd>' in text
    assert f"<dt>sources whole</dt><dd>{len(SOURCES) - 1} of {len(SOURCES)}</dd>" in text
    assert "merging 7 runs of 5,000 rows into a delta: 3 of 4 tasks" in text
    assert 'style="width:75.0%"' in text
    row = rf"<td>{SOURCES[0]}</td><td><span class=\"state warn\">dumping</span></td><td>4,321</td>"
    assert re.search(row, text)
    assert "holds 'many' &lt;script&gt;" in text, "what ails it is shown as text"
    assert "<td>3:1</td><td>8:2</td>" in text and "being compared with the database" in text
    for kind, stop_at in (("base", snapshot), ("segment", snapshot)):
        assert re.search(rf"<td>{kind}</td><td>[0-9:]+</td><td>{stop_at}</td>", text)
    assert "<td>1,234 → 99</td><td>5.0 MiB → 700 B</td><td>1.3 s</td>" in text
    assert "<title>Databus bootstrap server</title>" in text
    assert 'id="trouble" class="bad" role="status"></span>' in text
