"""The process fixture that the fault tests rely on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.config_text import relay_text
from tests.support.processes import DatabusProcess, Processes, wait_process_gone


@pytest.fixture
def relay(processes: Processes, tmp_path: Path, free_port: Callable[[], int]) -> DatabusProcess:
    """A relay that is ready."""
    port = free_port()
    path = tmp_path / "databus.toml"
    url = "generator://?events_per_second=10&seed=1"
    path.write_text(relay_text(url, "*", name="made", port=port, ring_bytes="1MiB"))
    started = processes.start("relay", "-c", path)
    started.wait_ready(f"http://127.0.0.1:{port}/readyz", 40.0)
    return started


def test_a_relay_is_ready_ends_on_sigterm_with_0_and_leaves_no_process(
    relay: DatabusProcess,
) -> None:
    below = [one.pid for one in relay.descendants()]
    assert relay.stop(signal.SIGTERM) == 0, relay.log
    for pid in below:
        wait_process_gone(pid)


def test_kill_9_takes_the_workers_and_fetchers_too(
    relay: DatabusProcess,
) -> None:
    below = [one.pid for one in relay.descendants()]
    assert below, "a relay has a fetcher process"
    assert relay.kill9() == -9
    for pid in below:
        wait_process_gone(pid)


def test_a_process_that_ends_before_it_is_ready_shows_its_log(
    processes: Processes, tmp_path: Path
) -> None:
    relay = processes.start("relay", "-c", tmp_path / "missing.toml")
    with pytest.raises(RuntimeError, match=r"ended with exit code [1-9]\d* .*[\s\S]*missing\.toml"):
        relay.wait_ready("http://127.0.0.1:9/readyz", 20.0)


def test_a_command_runs_to_its_end_with_its_output_apart(processes: Processes) -> None:
    done = processes.run("--help")
    assert done.returncode == 0, done.stderr
    assert "relay" in done.stdout
