"""The log of a server: text or JSON lines, in the process and its children."""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from databus.common.errors import ConfigError
from databus.common.processes import server_log
from tests.support.config_text import relay_text
from tests.support.processes import Processes
from tests.support.waiting import eventually_sync


def test_a_line_has_the_message_its_time_and_the_traceback_of_an_exception() -> None:
    try:
        raise ValueError('no "such"\nrow')
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("databus.x", logging.ERROR, "x.py", 1, "%s é", ("a\nb",), info)
    line = server_log.JsonLines().format(record)
    assert "\n" not in line
    document = json.loads(line)
    assert (document["level"], document["logger"]) == ("ERROR", "databus.x")
    assert document["message"] == "a\nb é"
    assert document["exception"].endswith('ValueError: no "such"\nrow')
    assert abs(dt.datetime.fromisoformat(document["time"]).timestamp() - record.created) < 1e-3
    assert document["process"] == record.process


def test_another_format_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(server_log.LOG_FORMAT, "xml")
    with pytest.raises(ConfigError, match="'xml' is neither text nor json"):
        server_log.log_to_stderr()


@pytest.mark.slow
@pytest.mark.processes
def test_a_relay_and_its_children_log_json(
    processes: Processes, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    port = free_port()
    config = tmp_path / "databus.toml"
    # Nothing listens there: the fetcher, a child, reports it.
    nowhere = f"postgresql://relay@127.0.0.1:{free_port()}/shop"
    config.write_text(relay_text(nowhere, "public.*", port=port))
    relay = processes.start("relay", "-c", config, "--log-format", "json", name="relay")

    def documents() -> list[dict[str, object]]:
        lines = [line for line in relay.log.split("\n")[:-1] if line]
        return [json.loads(line) for line in lines]

    def has_logged() -> bool:
        processes_seen = {one["process"] for one in documents()}
        return len(processes_seen) > 1 and any(one["level"] == "WARNING" for one in documents())

    eventually_sync(has_logged, 30, "the relay and its fetcher have logged")
    assert any(f"127.0.0.1:{port}" in str(one["message"]) for one in documents())
