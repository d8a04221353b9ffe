"""How servers begin and how processes end: addresses, signals, nothing left behind."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.config_text import bootstrap_text, relay_text
from tests.support.processes import DatabusProcess, Processes, http_status, wait_process_gone
from tests.support.waiting import eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SECONDS = 10.0
"""A process has ended long before."""


class Servers:
    """A configuration, and the processes that run by it."""

    def __init__(self, folder: Path, processes: Processes, relay: int, bootstrap: int) -> None:
        self.config = folder / "databus.toml"
        self.relay_url = f"http://127.0.0.1:{relay}"
        url = "generator://?events_per_second=50&seed=1"
        self.config.write_text(
            relay_text(url, name="made", port=relay, ring_bytes="1MiB")
            + bootstrap_text(
                self.relay_url,
                bootstrap,
                spark_master="local[1]",
                segment_every="1s",
                apply_every="1s",
            )
        )
        self.bootstrap_url = f"http://127.0.0.1:{bootstrap}"
        self.processes = processes

    def relay(self) -> DatabusProcess:
        relay = self.processes.start("relay", "-c", self.config, name="relay")
        relay.wait_ready(f"{self.relay_url}/readyz", 40.0)
        return relay

    def bootstrap(self) -> DatabusProcess:
        bootstrap = self.processes.start(
            "bootstrap", "-c", self.config, "--no-apply", name="bootstrap"
        )
        bootstrap.wait_ready(f"{self.bootstrap_url}/healthz", 40.0)
        return bootstrap


@pytest.fixture
def servers(tmp_path: Path, processes: Processes, free_port: Callable[[], int]) -> Servers:
    return Servers(tmp_path, processes, free_port(), free_port())


def end(process: DatabusProcess, number: signal.Signals) -> int:
    """Its exit code after the signal; it and all below it are gone within seconds."""
    below = [one.pid for one in process.descendants()]
    assert process.process is not None
    process.process.send_signal(number)
    code = process.wait(SECONDS)
    for pid in below:
        wait_process_gone(pid)
    return code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_relay_and_bootstrap_say_where_they_are_and_end_with_0(
    servers: Servers, number: signal.Signals
) -> None:
    relay, bootstrap = servers.relay(), servers.bootstrap()
    assert f"relay at {servers.relay_url} serves made (generator://" in relay.log
    assert f"status page {servers.relay_url}/status" in relay.log
    assert http_status(f"{servers.relay_url}/status") == 200
    assert f"bootstrap server at {servers.bootstrap_url} serves every database" in bootstrap.log
    assert f"status {servers.bootstrap_url}/v1/status" in bootstrap.log
    assert http_status(f"{servers.bootstrap_url}/v1/status") == 200
    if number == signal.SIGTERM:  # Once is enough.
        check_that_a_port_in_use_is_one_line_with_the_address(servers)
    assert end(bootstrap, number) == 0, bootstrap.log
    assert end(relay, number) == 0, relay.log
    assert "Traceback" not in relay.log + bootstrap.log
    assert http_status(f"{servers.relay_url}/healthz") is None


def check_that_a_port_in_use_is_one_line_with_the_address(servers: Servers) -> None:
    for command, url in (("relay", servers.relay_url), ("bootstrap", servers.bootstrap_url)):
        done = servers.processes.run(command, "-c", servers.config)
        address = url.removeprefix("http://")
        assert done.returncode == 1
        assert f"cannot listen at {address}: Address already in use" in done.stderr
        assert len(done.stderr.splitlines()) == 2, done.stderr


def test_tail_waits_for_a_relay_that_is_away_and_ends_on_a_signal_without_a_complaint(
    servers: Servers,
) -> None:
    relay = servers.relay()
    address = f"{servers.relay_url}/made"
    tails = [servers.processes.start("tail", address, name=f"tail-{n}") for n in range(3)]

    def all_print() -> bool:
        return all('"op"' in tail.log for tail in tails)

    eventually_sync(all_print, 40.0, "each tail prints")
    for tail, number, code in zip(tails, (signal.SIGINT, signal.SIGTERM), (130, 143), strict=False):
        assert end(tail, number) == code
        assert [line for line in tail.log.splitlines() if not line.startswith("{")] == []
    tail = tails[-1]
    relay.kill9()
    eventually_sync(lambda: "server_unavailable" in tail.log or "; " in tail.log, 20.0, "a word")
    seen = tail.log.count('"op"')
    relay.start().wait_ready(f"{servers.relay_url}/readyz", 40.0)
    eventually_sync(lambda: tail.log.count('"op"') > seen, 30.0, "tail continues")
    assert tail.running


@pytest.mark.spark
@pytest.mark.timeout(180)
def test_apply_every_ends_on_sigterm_with_0_and_takes_its_java_with_it(servers: Servers) -> None:
    """In the midst of a merge, of which there is always a next one while the relay runs."""
    servers.relay()
    servers.bootstrap()
    apply = servers.processes.start("apply", "-c", servers.config, "--every", "1s", name="apply")
    eventually_sync(lambda: " base up to " in apply.log, 90.0, "a round")
    merges = apply.log.count(": merging ")
    eventually_sync(lambda: apply.log.count(": merging ") > merges, 60.0, "another merge begins")
    assert any("java" in one.name() for one in apply.descendants())
    assert end(apply, signal.SIGTERM) == 0, apply.log
    assert "Traceback" not in apply.log
