"""The whole system over mutual TLS, as processes: relay, chained relay, bootstrap, commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from databus.client import DatabusClient
from databus.common.access.credentials import Credentials
from databus.common.checkpoint import Position
from databus.common.errors import DatabusError
from databus.common.http.peer_calls import peer_call
from tests.support.certificates import Authority
from tests.support.config_text import bootstrap_text, relay_text, section
from tests.support.processes import Processes
from tests.support.system import sqlite_shop
from tests.support.waiting import eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(200)]


def answered(url: str, path: str, credentials: Credentials) -> dict[str, Any] | None:
    """The JSON at a path, or None while the server is not ready."""
    try:
        with peer_call("GET", url, path, silence_s=20, credentials=credentials) as answer:
            return answer.json_object()
    except DatabusError:
        return None


def test_everything_that_works_without_tls_works_with_mutual_tls(
    tmp_path: Path, processes: Processes, free_port: Callable[[], int]
) -> None:
    authority = Authority(tmp_path / "ca")
    tls = authority.server_tls(clients="required").model_dump(mode="json")
    credentials = authority.credentials("operator")
    files = {name: getattr(credentials, name) for name in ("ca", "certificate", "key")}
    shop, url = sqlite_shop(tmp_path / "shop.db")
    with shop.session() as step:
        for _ in range(100):
            step()
    ports = [free_port() for _ in range(3)]
    top, below, bootstrap = (f"https://127.0.0.1:{port}" for port in ports)
    http = section("[http.tls]", tls)
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(
        http
        + relay_text(url, port=ports[0])
        + bootstrap_text(top, ports[2], credentials=files, databases=["shop"])
    )
    parent = f"relay+{top}/shop"
    second.write_text(http + relay_text(parent, port=ports[1], data_dir="below", options=files))
    processes.start("relay", "-c", first, name="relay")
    processes.start("relay", "-c", second, name="below")
    processes.start("bootstrap", "-c", first, "--role", "server", name="server")
    processes.start("bootstrap", "-c", first, "--role", "writer", name="writer")

    def are_ready() -> bool:
        return all(answered(url, "/readyz", credentials) for url in (top, below, bootstrap))

    eventually_sync(are_ready, 30, "all servers are ready", poll_s=0.2)

    def ends() -> list[Position]:
        """The last position of each server that has one."""
        documents = [answered(url, "/v1/databases", credentials) for url in (top, below, bootstrap)]
        listed = [one for document in documents if document for one in document["databases"]]
        return [Position(**one["max"]) for one in listed if "max" in one]

    def have_read() -> bool:
        found = ends()
        return len(found) == 3 and len(set(found)) == 1

    eventually_sync(have_read, 30, "all servers have the changes", poll_s=0.2)
    end = ends()[0]

    def windows_of(*relays: str, start: str, bootstraps: tuple[str, ...] = ()) -> int:
        """How many events a client reads to the end."""
        client = DatabusClient(
            database="shop", relays=relays, bootstraps=bootstraps, start=start, **files
        )
        events = 0
        with contextlib.closing(client.windows(idle_s=60)) as windows:
            for window in windows:
                events += len(list(window))
                if window.checkpoint is None or window.checkpoint.position >= end:
                    break
        return events

    events = windows_of(top, start="oldest")
    assert events > 0
    assert windows_of(below, start="oldest") == events
    assert windows_of(top, start="bootstrap", bootstraps=(bootstrap,)) > 0

    environment = {f"DATABUS_{name.upper()}": value for name, value in files.items()}

    def run(*arguments: str | Path) -> str:
        ran = processes.run(*arguments, environment=environment, timeout_s=90)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    assert "shop" in run("status", top, bootstrap)
    tailed = run("tail", f"{top}/shop", "--from", "oldest", "--until-idle", "5s")
    assert len(tailed.splitlines()) >= events
    assert run("dump", f"{below}/shop", "--sources", "main.customers")
    compared = run("verify", "-c", first, "--database", "shop", "--json")
    assert compared
    assert all(not json.loads(line)["differences"] for line in compared.splitlines())
    ran = processes.run("status", top, environment={"DATABUS_CA": files["ca"]})
    assert ran.returncode == 1
