"""Secrets planted wherever the configuration takes one appear nowhere but in its file."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from tests.support.fixtures import FreshDatabase
from tests.support.processes import Processes
from tests.support.waiting import PATIENCE, eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(300)]

PATHS = (
    "/v1/status", "/status", "/metrics", "/v1/databases", "/v1/shop/sources", "/v1/shop/dumps",
    "/v1/shop/tables", "/v1/refused/sources", "/v1/silent/sources", "/v1/chained/sources",
    "/v1/shop/register", "/openapi.json", "/healthz", "/readyz", "/nowhere",
)  # fmt: skip


class Canary:
    """A password of four marks with /, # and ? between them; any mark that is seen is a leak."""

    def __init__(self) -> None:
        self.marks = [secrets.token_hex(6) for _ in range(4)]
        first, second, third, fourth = self.marks
        self.password = f"{first}/{second}#{third}?{fourth}@:%"
        self.encoded = quote(self.password, safe="")

    def seen_in(self, text: bytes) -> bool:
        return any(mark.encode() in text for mark in self.marks)


def processes_that_show(canaries: list[Canary]) -> set[str]:
    """Command lines and environments on this machine that hold a mark."""
    found = set()
    for folder in Path("/proc").iterdir():
        for name in ("cmdline", "environ") if folder.name.isdigit() else ():
            with contextlib.suppress(OSError):
                if any(canary.seen_in((folder / name).read_bytes()) for canary in canaries):
                    found.add(f"{name} of {(folder / 'comm').read_text().strip()}")
    return found


@contextlib.contextmanager
def watching(canaries: list[Canary]) -> Iterator[set[str]]:
    """What ``processes_that_show`` finds at any moment of the block."""
    found: set[str] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            found.update(processes_that_show(canaries))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def answer_of(url: str, body: object = None) -> bytes:
    """An answer's headers and body, whatever its status; empty while there is none."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if data else {}
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10 * PATIENCE) as answer:
            return bytes(answer.headers) + bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return bytes(error.headers) + error.read()
    except OSError:
        return b""


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_no_secret_is_printed_logged_answered_stored_or_handed_to_a_process_in_the_open(
    mariadb_database: FreshDatabase,
    processes: Processes,
    free_port: Callable[[], int],
    tmp_path: Path,
    open_umask: None,
) -> None:
    names = ("database", "refused", "silent", "chained", "relays", "salt", "s3")
    canary = {name: Canary() for name in names}
    user, db = f"u{secrets.token_hex(4)}", mariadb_database
    db.execute(f"CREATE USER {user} IDENTIFIED BY '{canary['database'].password}'")
    db.execute(f"GRANT ALL ON *.* TO {user}")
    db.execute("CREATE TABLE people (id INT PRIMARY KEY, email VARCHAR(100))")
    db.execute("INSERT INTO people VALUES (1, 'a@example.org'), (2, 'b@example.org')")
    at = urlsplit(db.url)
    server = f"{at.hostname}:{at.port}/{db.name}"
    relay_port, bootstrap_port = free_port(), free_port()
    file = tmp_path / "databus.toml"
    encoded = {name: one.encoded for name, one in canary.items()}
    file.write_text(f"""
[relay]
listen = "127.0.0.1:{relay_port}"
data_dir = "relay"
[[database]]
name = "shop"
url = "mysql://{user}:{encoded["database"]}@{server}"
sources = ["{db.name}.*"]
hash_columns = ["*.email"]
hash_salt = "{encoded["salt"]}"
ring_bytes = "8MiB"
[[database]]
name = "refused"
url = "mysql://{user}:{encoded["refused"]}@{server}"
ring_bytes = "8MiB"
[[database]]
name = "silent"
url = "postgresql://{user}:{encoded["silent"]}@127.0.0.1:1/none"
ring_bytes = "8MiB"
[[database]]
name = "chained"
url = "relay+http://reader:{encoded["chained"]}@127.0.0.1:1/shop"
ring_bytes = "8MiB"
[bootstrap]
listen = "127.0.0.1:{bootstrap_port}"
data_dir = "bootstrap"
databases = ["shop"]
relays = ["http://reader:{encoded["relays"]}@127.0.0.1:1",
          "http://reader:{encoded["relays"]}@127.0.0.1:{relay_port}"]
segment_every = "1s"
apply_every = "1s"
spark_master = "local[1]"
[bootstrap.s3]
secret_key = "{encoded["s3"]}"
session_token = "{encoded["s3"]}"
""")
    file.chmod(0o600)
    relay_url, bootstrap_url = (f"http://127.0.0.1:{p}" for p in (relay_port, bootstrap_port))
    texts: dict[str, bytes] = {}
    canaries = list(canary.values())

    def seeded() -> bool:
        document = json.loads(answer_of(f"{bootstrap_url}/v1/status").partition(b"\n\n")[2] or "{}")
        found = document.get("databases") or [{}]
        return bool(found[0].get("state") == "seeded" and found[0].get("snapshot"))

    with watching(canaries) as shown:
        relay = processes.start("relay", "-c", file, name="relay")
        relay.wait_ready(f"{relay_url}/healthz")
        bootstrap = processes.start("bootstrap", "-c", file, name="bootstrap")
        bootstrap.wait_ready(f"{bootstrap_url}/healthz")
        try:
            eventually_sync(seeded, 90, "seeded and merged", poll_s=0.5)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"{error}\n{bootstrap.log[-3000:]}\n{relay.log[-3000:]}") from None
        for command in (
            ("check", file),
            ("dump", f"{relay_url}/shop"),
            ("dump", f"{relay_url}/refused", "--no-wait"),
            ("status", relay_url, bootstrap_url),
            ("apply", "-c", file, "--once"),
            ("verify", "-c", file, "--database", "shop"),
            ("runs", "-c", file),
            ("bootstrap", "-c", file),  # the address is taken
        ):
            ran = processes.run(*command, timeout_s=90)
            texts[f"databus {command[0]}"] = (ran.stdout + ran.stderr).encode()
        for url in (relay_url, bootstrap_url):
            texts |= {f"{url}{path}": answer_of(f"{url}{path}") for path in PATHS}
        for name in ("shop", "refused", "silent", "chained"):
            path = f"{relay_url}/v1/{name}"
            texts[f"{path} dump"] = answer_of(f"{path}/dumps", {"sources": ["none.*"]})
            texts[f"{path} chunk"] = answer_of(f"{path}/chunks", {"source": "none.none"})
    db.execute(f"DROP USER {user}")
    status = texts[f"{relay_url}/v1/status"]
    assert b"source_unavailable" in status and b"preflight_failed" in status, status
    assert b":***@" in texts["databus check"] + relay.log.encode() + bootstrap.log.encode()
    texts |= {"relay.log": relay.log.encode(), "bootstrap.log": bootstrap.log.encode()}
    leaks = {
        (where, name)
        for where, text in texts.items()
        for name, one in canary.items()
        if one.seen_in(text)
    }
    assert leaks == set()
    assert shown == set()
    files = [p for folder in ("relay", "bootstrap") for p in (tmp_path / folder).rglob("*")]
    assert len(files) > 20
    assert [
        p for p in files if p.is_file() and any(c.seen_in(p.read_bytes()) for c in canaries)
    ] == []
    modes = {str(p): oct(stat.S_IMODE(p.lstat().st_mode)) for p in files if not p.is_symlink()}
    assert {name: mode for name, mode in modes.items() if int(mode, 8) & 0o077} == {}
