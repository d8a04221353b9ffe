"""The tutorial works as written: its commands are run in order, and print what it shows.

A block of commands whose title begins with ``Terminal`` runs beside the others; a block of text
below a block of commands is what they print.  Addresses are exchanged for those of the test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from databus.cli.demo.private_servers import PostgresServer
from tests.support.processes import DatabusProcess
from tests.support.snippets import ROOT, Snippet, blocks
from tests.support.waiting import PATIENCE, eventually_sync

PAGE = ROOT / "docs" / "tutorial.md"
EXAMPLE = ROOT / "examples" / "search_index"


class Terminal:
    """A folder with the example's files, and the programs that were started in it."""

    def __init__(
        self, folder: Path, addresses: dict[str, str], environment: dict[str, str]
    ) -> None:
        self.folder = folder
        self.addresses = addresses
        self.environment = environment
        self.started: dict[str, DatabusProcess] = {}
        for path in EXAMPLE.iterdir():
            if path.is_file():
                (folder / path.name).write_text(self.here(path.read_text()))

    def here(self, text: str) -> str:
        """The text with the addresses of this test."""
        for address, one in self.addresses.items():
            text = text.replace(address, one)
        return text

    def run(self, text: str) -> str:
        """Run commands to their end; what they print."""
        done = subprocess.run(
            ["bash", "-ec", self.here(text)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60 * PATIENCE,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, title: str, text: str) -> None:
        """Run a command beside the others; one of the same title ends first, as by ctrl-C."""
        self.end(title)
        command = ["bash", "-c", f"cd {self.folder} && exec {self.here(text)}"]
        log = self.folder / f"{title}.log"
        log.unlink(missing_ok=True)
        process = DatabusProcess([], log, environment=self.environment, command=command)
        self.started[title] = process.start()

    def end(self, title: str) -> None:
        """End what runs in a terminal."""
        if title in self.started:
            self.started.pop(title).stop()

    def expect(self, last: Snippet, shown: Snippet) -> None:
        """Wait until the last block prints every line that the page shows."""
        title = shown.marker.removeprefix("in: ") or title_of(last)

        def prints() -> bool:
            text = self.started[title].log if title in self.started else self.run(last.text)
            missing = [one for one in self.here(shown.text).splitlines() if one not in text]
            assert not missing, f"{last}: {missing} not in\n{text}"
            return True

        eventually_sync(prints, 60, f"{last} prints what {shown} shows", poll_s=0.05)


def title_of(snippet: Snippet) -> str:
    found = re.search(r'title="(Terminal \d)"', snippet.info)
    return found[1] if found else ""


@pytest.fixture
def terminal(
    postgres: PostgresServer, tmp_path: Path, free_port: Callable[[], int]
) -> Iterator[Terminal]:
    addresses = {
        "127.0.0.1:5432": f"127.0.0.1:{postgres.port}",
        "127.0.0.1:8700": f"127.0.0.1:{free_port()}",
        "127.0.0.1:8701": f"127.0.0.1:{free_port()}",
    }
    user, password = re.findall(r"//(\w+):(\w+)@", postgres.url("shop"))[0]
    programs = [Path(sys.executable).parent, Path(postgres._binary("psql")).parent]
    environment = {
        **os.environ,
        "PATH": ":".join([*map(str, programs), os.environ["PATH"]]),
        "PGHOST": "127.0.0.1",
        "PGPORT": str(postgres.port),
        "PGUSER": user,
        "PGPASSWORD": password,
    }
    found = Terminal(tmp_path, addresses, environment)
    try:
        yield found
    finally:
        for title in list(found.started):
            found.end(title)
        postgres.drop_database("shop")
        postgres.execute("DROP ROLE IF EXISTS databus_reader")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_the_tutorial_does_what_it_shows(terminal: Terminal) -> None:
    last: Snippet | None = None
    counts = {"run": 0, "start": 0, "expect": 0}
    for snippet in blocks("docs/tutorial.md", PAGE.read_text()):
        if snippet.language == "text":
            assert last is not None
            terminal.expect(last, snippet)
            counts["expect"] += 1
        elif snippet.language == "sh" and "pip install" not in snippet.text:
            last = snippet
            terminal.end(snippet.marker.removeprefix("stop: "))
            if title := title_of(snippet):
                terminal.start(title, snippet.text)
                counts["start"] += 1
            elif not snippet.text.startswith("python search.py"):
                terminal.run(snippet.text)
                counts["run"] += 1
    assert counts == {"run": 5, "start": 4, "expect": 10}
