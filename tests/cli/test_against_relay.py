"""``tail``, ``dump`` and ``status`` against a relay over SQLite, a process of its own."""

from __future__ import annotations

import datetime as dt
import json
import re
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import rich

from databus.cli.console import dump_status
from databus.cli.demo.private_servers import free_port
from tests.support.config_text import relay_text
from tests.support.processes import Processes
from tests.support.waiting import PATIENCE, eventually_sync

SCRIPT = [
    ["INSERT INTO orders VALUES (1, 'né à Łódź'), (2, NULL)", "INSERT INTO stock VALUES (7, 3)"],
    ["UPDATE orders SET note = 'x' WHERE id = 1", "UPDATE orders SET id = 3 WHERE id = 2"],
    ["DELETE FROM orders WHERE id = 1"],
]
# The third transaction's update of a key is a delete and an insert.
OPS = ["c", "c", "c", "u", "d", "c", "d"]
PARTS = 40  # rows that were there before the relay
IDLE = ("--until-idle", "1s")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The stream of a database in which ``SCRIPT`` has been committed."""
    folder = tmp_path_factory.mktemp("relay")
    port = free_port()
    config = folder / "databus.toml"
    url = f"sqlite:///{folder / 'shop.db'}"
    config.write_text(relay_text(url, "main.*", port=port, ring_bytes="4MiB"))
    processes = Processes(folder)
    with closing(sqlite3.connect(folder / "shop.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, note TEXT)")
        connection.execute("CREATE TABLE stock (sku INTEGER PRIMARY KEY, on_hand INTEGER)")
        connection.execute("CREATE TABLE parts (id INTEGER PRIMARY KEY)")
        connection.executemany("INSERT INTO parts VALUES (?)", [(n,) for n in range(1, PARTS + 1)])
        try:
            base = f"http://127.0.0.1:{port}"
            processes.start("relay", "-c", config).wait_ready(f"{base}/readyz")
            for number, statements in enumerate(SCRIPT):
                connection.execute("BEGIN IMMEDIATE")
                for statement in statements:
                    connection.execute(statement)
                connection.execute("COMMIT")
                # Two transactions that are polled at once are one window.
                wait_for_windows(f"{base}/v1/shop", number + 1)
            yield f"{base}/shop"
        finally:
            processes.end_all()


def wait_for_windows(url: str, count: int) -> None:
    def has_them() -> bool:
        with urllib.request.urlopen(f"{url}/stream?format=ndjson&wait_ms=0") as answer:
            return bool(answer.read().count(b"end_of_window") == count)

    eventually_sync(has_them, 30.0, f"{count} windows")


def tail(databus: Any, url: str, *options: str) -> list[dict[str, Any]]:
    done = databus("tail", url, *IDLE, *options)
    assert (done.code, done.err) == (0, "")
    return [json.loads(line) for line in done.out.splitlines()]


def events(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in objects if "op" in one]


def captured(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of commits: another test may have dumped."""
    return [one for one in events(objects) if one["op"] != "r"]


def test_tail_prints_objects_in_order_with_the_end_of_each_window(databus: Any, url: str) -> None:
    objects = tail(databus, url)
    found = captured(objects)
    assert [one["op"] for one in found] == OPS
    assert found[0]["after"] == {"id": 1, "note": "né à Łódź"}
    assert (found[4]["key"], found[5]["key"]) == ({"id": 2}, {"id": 3})
    ends = [one for one in objects if one.get("control") == "end_of_window"]
    assert [one["events"] for one in ends][:3] == [3, 3, 1]


def test_tail_from_an_scn_begins_after_it(databus: Any, url: str) -> None:
    scns = sorted({one["scn"] for one in captured(tail(databus, url))})
    later = captured(tail(databus, url, "--from", str(scns[0])))
    assert [one["op"] for one in later] == OPS[3:]
    assert captured(tail(databus, url, "--from", str(scns[-1]))) == []
    assert captured(tail(databus, url, "--from", "latest")) == []


def test_tail_from_a_time_begins_with_what_was_committed_then(databus: Any, url: str) -> None:
    found = captured(tail(databus, url))
    cut_us = max(one["ts_us"] for one in found)
    # Without a zone it is UTC, as at the relay, wherever the machine is.
    time = dt.datetime.fromtimestamp(cut_us / 1e6, dt.UTC).replace(tzinfo=None)
    later = captured(tail(databus, url, "--from", time.isoformat()))
    assert later == [one for one in found if one["ts_us"] == cut_us]
    assert len(later) < len(found)


def test_tail_ahead_of_the_stream_waits_and_is_idle(databus: Any, url: str) -> None:
    assert tail(databus, url, "--from", "99999999999") == []


def test_tail_shows_only_the_ops_that_are_wanted(databus: Any, url: str) -> None:
    assert [one["op"] for one in events(tail(databus, url, "--ops", "d"))] == ["d", "d"]


def test_tail_shows_only_the_sources_that_are_wanted(databus: Any, url: str) -> None:
    found = captured(tail(databus, url, "--sources", "main.st*"))
    assert [one["source"] for one in found] == ["main.stock"]


def test_the_partitions_of_tail_together_are_the_whole(databus: Any, url: str) -> None:
    parts = [captured(tail(databus, url, "--partition", f"mod:2:{part}")) for part in (0, 1)]
    together = sorted((one["scn"], one["seq"]) for part in parts for one in part)
    assert together == [(one["scn"], one["seq"]) for one in captured(tail(databus, url))]
    assert all(parts), "the keys fall into both parts"


def test_tail_as_a_table_has_headings_and_a_line_an_event(databus: Any, url: str) -> None:
    done = databus("tail", url, *IDLE, "--format", "table", "--ops", "c,u,d")
    assert done.code == 0
    head, *rows = done.out.splitlines()
    assert head.split() == ["scn", "seq", "o", "source", "key", "after"]
    assert [row.split()[2] for row in rows] == OPS
    assert "né à Łódź" in rows[0]


def test_tail_into_head_ends_without_a_word_of_complaint(url: str) -> None:
    command = f"{sys.executable} -c 'from databus.cli.main import app; app()' tail {url}"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} --until-idle 5s --format table | head -1"],
        capture_output=True,
        text=True,
        timeout=50 * PATIENCE,
        check=True,
    )
    assert done.stdout.split() == ["scn", "seq", "o", "source", "key", "after"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (("tail", "{base}/shoop"), "unknown_database: there is no database 'shoop'"),
        (("dump", "{base}/shoop"), "unknown_database"),
        (("dump", "{base}/shoop", "--list"), "unknown_database"),
        (("tail", "{base}/shop", "--sources", "main.ordes"), "unknown_source"),
        (("dump", "{base}/shop", "--sources", "main.ordes"), "unknown_source"),
        (("dump", "{base}/shop", "--pause", "nosuch"), "no dump 'nosuch'"),
        (("dump", "{base}/shop", "--cancel", "nosuch"), "no dump 'nosuch'"),
    ],
)
def test_what_the_relay_does_not_know_is_one_line_with_exit_code_1(
    databus: Any, url: str, words: tuple[str, ...], fragment: str
) -> None:
    done = databus(*(word.format(base=url.rpartition("/")[0]) for word in words))
    assert done.code == 1, done.err
    assert len(done.err.splitlines()) == 2
    assert done.err.startswith("databus: ")
    assert fragment in done.err


def test_a_dump_runs_to_its_end_and_its_rows_are_in_the_stream(databus: Any, url: str) -> None:
    done = databus("dump", url, "--sources", "main.orders")
    assert (done.code, done.err) == (0, "")
    assert "completed: 1 rows" in done.out
    name = done.out.split()[0]
    assert name in databus("dump", url, "--list").out
    rows = [one for one in events(tail(databus, url)) if one["op"] == "r"]
    assert {"id": 3, "note": None} in [one["after"] for one in rows]


def test_a_dump_takes_a_condition(databus: Any, url: str) -> None:
    parts = ("dump", url, "--sources", "main.parts")
    done = databus(*parts, "--where", "id % 10 = 7 OR id = 2", "--chunk-rows", "2")
    assert (done.code, done.err) == (0, "")
    assert "completed: 5 rows" in done.out
    rows = [one for one in events(tail(databus, url)) if one["op"] == "r"]
    assert [row["after"]["id"] for row in rows[-5:]] == [2, 7, 17, 27, 37]
    wrong = databus(*parts, "--where", "no_such_column = 1")
    assert wrong.code != 0
    assert "no_such_column" in wrong.err
    assert "Traceback" not in wrong.err


def test_a_terminal_shows_a_bar_with_the_pace_of_a_dump_and_the_time_that_is_left(
    databus: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump_status, "_POLL_S", 0.02)
    dump = ("dump", url, "--sources", "main.parts", "--chunk-rows", "10", "--delay-ms", "100")
    piped = databus(*dump)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(rich, "_console", None)  # it remembers what it was made for
    shown = databus(*dump)
    assert (piped.code, shown.code) == (0, 0)
    bar = re.compile(
        r"running: \d+ rows in \d chunks of main.parts .*━.* [\d,.]+ rows/s, \d:\d\d left"
    )
    assert bar.search(shown.out)
    assert not bar.search(piped.out)
    # What stays is the same line in both.
    assert f"completed: {PARTS} rows" in piped.out.splitlines()[-1]
    assert f"completed: {PARTS} rows" in shown.out.splitlines()[-1]


def test_a_dump_of_keys_names_those_that_have_no_row(databus: Any, url: str) -> None:
    done = databus("dump", url, "--sources", "main.orders", "--keys", "[3, [404]]")
    assert done.code == 0
    assert "completed: 1 rows" in done.out
    assert "no row has the key [404]" in done.out
    assert databus("dump", url, "--keys", "3, 404").code == 2
    again = databus("dump", url, "--watch", done.out.split()[0])
    assert again.out == done.out


def test_a_dump_is_paused_resumed_and_cancelled(databus: Any, url: str) -> None:
    started = databus("dump", url, "--no-wait", "--chunk-rows", "1", "--delay-ms", "60000")
    name = started.out.strip()
    assert started.code == 0
    assert f"{name} paused" in databus("dump", url, "--pause", name).out
    assert f"{name} paused" in databus("dump", url, "--list").out
    resumed = databus("dump", url, "--resume", name)
    assert resumed.code == 0
    assert resumed.out.split()[1] in ("queued:", "running:")
    assert databus("dump", url, "--cancel", name).out == f"{name} cancelled\n"
    assert f"{name} cancelled" in databus("dump", url, "--list").out
    again = databus("dump", url, "--resume", name)
    assert again.code != 0
    assert "Traceback" not in again.err


def test_status_shows_the_range_of_every_database(databus: Any, url: str) -> None:
    base = url.rpartition("/")[0]
    done = databus("status", base)
    assert (done.code, done.err) == (0, "")
    assert "shop" in done.out
    assert "streaming" in done.out
    document = json.loads(databus("status", base, "--json").out)
    assert document["url"] == base
    assert document["databases"][0]["name"] == "shop"


def test_status_shows_the_server_that_answers_where_another_does_not(
    databus: Any, url: str
) -> None:
    base = url.rpartition("/")[0]
    done = databus("status", f"http://127.0.0.1:{free_port()}", base)
    assert done.code == 1
    assert "streaming" in done.out
    assert done.err.startswith("databus: server_unavailable: ")


def test_doctor_examines_a_relay_and_names_a_server_that_does_not_answer(
    databus: Any, url: str
) -> None:
    base = url.rpartition("/")[0]
    done = databus("doctor", base)
    assert (done.code, done.out) == (
        0,
        "1 servers, 0 findings, 0 of them stop changes or lose them\n",
    )
    away = f"http://127.0.0.1:{free_port()}"
    done = databus("doctor", base, away)
    assert done.code == 3
    assert done.out.startswith(f"{away}: ")
    assert "1 of them stop changes" in done.out
