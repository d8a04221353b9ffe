"""Tokens over processes: made, used by every client, exchanged without a restart, shown nowhere."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from databus.client import DatabusClient
from databus.common.access.credentials import Credentials
from databus.common.errors import DatabusError, Unauthenticated
from databus.common.http.peer_calls import peer_call
from tests.support.config_text import bootstrap_text, generator_text, relay_text
from tests.support.processes import Processes
from tests.support.waiting import eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(200)]

GRANTS = {
    "operator": '[{ actions = ["read", "dump", "admin", "monitor"] }]',
    "replica": '[{ actions = ["read", "replicate", "dump", "admin"] }]',
    "reader": '[{ actions = ["read"], sources = ["gen.*"] }]',
}


def callers(hashes: dict[str, list[str]]) -> str:
    return "".join(
        f'[[auth.tokens]]\nname = "{name}"\nhashes = {json.dumps(each)}\ngrants = {GRANTS[name]}\n'
        for name, each in hashes.items()
    )


def shown_by_processes(tokens: list[str]) -> set[str]:
    """The processes of this machine whose command line or environment has a token."""
    found = set()
    for folder in Path("/proc").iterdir():
        for name in ("cmdline", "environ") if folder.name.isdigit() else ():
            try:
                text = (folder / name).read_bytes()
            except OSError:
                continue
            if any(token.encode() in text for token in tokens):
                found.add(str(folder / name))
    return found


def test_tokens_are_made_used_exchanged_and_shown_nowhere(
    tmp_path: Path, processes: Processes, free_port: Callable[[], int]
) -> None:
    tokens: dict[str, str] = {}
    hashes: dict[str, list[str]] = {}
    for name in GRANTS:
        made = processes.run("token", "make", name)
        tokens[name] = made.stdout.strip()
        hashes[name] = [made.stderr.partition('hashes = ["')[2].partition('"]')[0]]
        assert tokens[name] not in made.stderr
        (tmp_path / f"{name}.token").write_text(made.stdout)
    ports = [free_port() for _ in range(3)]
    top, below, bootstrap = (f"http://127.0.0.1:{port}" for port in ports)
    credentials = {"token_file": "replica.token"}
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"

    def write(hashes: dict[str, list[str]]) -> None:
        relay = generator_text(tmp_path, 50).replace("127.0.0.1:0", f"127.0.0.1:{ports[0]}")
        served = bootstrap_text(top, ports[2], credentials=credentials, databases=["gen"])
        first.write_text(callers(hashes) + relay + served)

    write(hashes)
    options = {"token_file": str(tmp_path / "replica.token")}
    second.write_text(
        callers(hashes)
        + relay_text(
            f"relay+{top}/gen", name="gen", port=ports[1], data_dir="below", options=options
        )
    )
    relay = processes.start("relay", "-c", first, name="relay")
    processes.start("relay", "-c", second, name="below")
    server = processes.start("bootstrap", "-c", first, "--role", "server", name="server")
    processes.start("bootstrap", "-c", first, "--role", "writer", name="writer")
    answers: list[str] = []

    def called(url: str, path: str, name: str = "operator") -> dict[str, Any]:
        given = Credentials(token=tokens[name])
        try:
            with peer_call("GET", url, path, silence_s=20, credentials=given) as answer:
                document = answer.json_object()
        except DatabusError as error:
            document = {"code": error.code, "text": error.message}
        answers.append(json.dumps(document))
        return document

    def are_filled() -> bool:
        documents = [called(url, "/v1/databases", "reader") for url in (top, below, bootstrap)]
        found = [(document.get("databases") or [{}])[0] for document in documents]
        return all(one.get("max", {}).get("scn", 0) > 5 for one in found)

    eventually_sync(are_filled, 30, "every server has events", poll_s=0.3)

    def window_scn(url: str, **given: str) -> int:
        client = DatabusClient(database="gen", relays=[url], start="oldest", **given)
        with client.windows(idle_s=20) as windows:
            return next(iter(windows)).scn

    assert window_scn(top, token=tokens["reader"]) > 0
    assert window_scn(below, token_file=str(tmp_path / "reader.token")) > 0
    with pytest.raises(Unauthenticated):
        window_scn(top)
    assert called(top, "/v1/status", "reader")["code"] == "forbidden"
    for url in (top, below, bootstrap):
        assert "databases" in called(url, "/v1/status")
    environment = {"DATABUS_TOKEN_FILE": str(tmp_path / "operator.token")}
    for arguments, status in ((("status", top), 0), (("dump", f"{top}/gen", "--list"), 0)):
        ran = processes.run(*arguments, environment=environment)
        assert ran.returncode == status, ran.stderr
        answers += [ran.stdout, ran.stderr]
    ran = processes.run("status", top)
    assert ran.returncode == 1
    assert "unauthenticated" in ran.stderr

    # The reader's token is exchanged: both are valid, then the new one alone.
    old = tokens["reader"]
    made = processes.run("token", "make", "reader")
    tokens["new"] = made.stdout.strip()
    fresh = made.stderr.partition('hashes = ["')[2].partition('"]')[0]
    for valid, refused in (([*hashes["reader"], fresh], []), ([fresh], [old])):
        write({**hashes, "reader": valid})
        assert processes.run("reload", "-c", first).returncode == 0
        assert server.process is not None
        server.process.send_signal(signal.SIGHUP)
        for url in (top, bootstrap):

            def is_applied(url: str = url, refused: list[str] = refused) -> bool:
                tokens["old"] = old
                is_old_fine = "databases" in called(url, "/v1/databases", "old")
                return is_old_fine == (not refused) and "databases" in called(
                    url, "/v1/databases", "new"
                )

            eventually_sync(is_applied, 20, "the callers were read again", poll_s=0.1)
    assert relay.running
    assert server.running

    every = list(tokens.values())
    assert shown_by_processes(every) == set()
    texts = [*answers, *(process.log for process in processes.started)]
    assert [text for text in texts if any(token in text for token in every)] == []
    folders = [tmp_path / name for name in ("data", "below", "bootstrap")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if any(t.encode() in path.read_bytes() for t in every)] == []
