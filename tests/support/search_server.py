"""A private OpenSearch: one node from Maven Central's jars, started by OpenSearchNode.java."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.private_servers import free_port
from tests.support.maven_jars import jars_or_skip
from tests.support.waiting import PATIENCE

_PROGRAM = Path(__file__).with_name("OpenSearchNode.java")


class SearchServer:
    """A node in a folder of its own.

    Owner: one test process.
    """

    def __init__(self, folder: Path) -> None:
        self._jars = jars_or_skip("opensearch")
        if shutil.which("javac") is None:
            pytest.skip("there is no javac")
        self._folder = folder
        folder.mkdir(parents=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = (folder / "node.log").open("w")
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.process = subprocess.Popen(
            [
                "java", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-cp", f"{self._jars}/*",
                str(_PROGRAM), str(self._folder / "home"), str(self.port),
            ],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        deadline_s = time.monotonic() + 90 * PATIENCE
        while True:
            try:
                self.ask("GET", "/_cluster/health?wait_for_status=yellow&timeout=30s")
                return
            except OSError:
                log = self._folder / "node.log"
                assert self.process.poll() is None, log.read_text()[-6000:]
                assert time.monotonic() < deadline_s, log.read_text()[-6000:]
                time.sleep(0.05)

    def kill9(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it."""
        self.kill9()
        self._log.close()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer, in JSON; None for 404."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise AssertionError(f"{error.code}: {error.read()[:500]!r}") from error

    def documents(self, index: str) -> dict[str, dict[str, Any]]:
        """All documents of an index, by id."""
        self.ask("POST", f"/{index}/_refresh")
        found = self.ask("POST", f"/{index}/_search", {"size": 10_000, "version": True})
        hits = found["hits"]["hits"] if found else []
        return {one["_id"]: one["_source"] for one in hits}

    def empty(self) -> None:
        """Delete all indexes."""
        self.ask("DELETE", "/_all?expand_wildcards=open")


@pytest.fixture(scope="session")
def search_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchServer]:
    """A node that the tests of a process share."""
    server = SearchServer(tmp_path_factory.mktemp("search") / "node")
    yield server
    server.close()
