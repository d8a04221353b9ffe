"""``databus relay`` as an operator runs it, over a generator, for the time of a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from databus.cli.demo.guardian import Guardian
from databus.cli.demo.private_servers import free_port
from databus.common.access.authority import hash_of
from databus.relay.processes.supervisor import WORKER_MODULE
from tests.support.certificates import Authority

START_S = 120
TOKEN = "a-token-of-a-benchmark"
"""What a relay with TLS wants to see."""


class RelayProcess:
    """A relay with one database, ``gen``; entered, it has served windows up to ``until_scn``.

    Its data lie in ``folder`` and remain there, so that it can be entered again; without one they
    are temporary.  With ``tls`` it wants TLS and ``TOKEN``.

    Owner: the benchmark, as a context manager.
    """

    def __init__(
        self,
        source: str,
        ring_bytes: int,
        *,
        until_scn: int,
        workers: int = 1,
        folder: Path | None = None,
        start_s: float = START_S,
        tls: Authority | None = None,
    ) -> None:
        self.workers = workers
        self._source = source
        self._ring_bytes = ring_bytes
        self._until_scn = until_scn
        self._start_s = start_s
        self._tls = tls
        self._context = tls.credentials().context("https://localhost") if tls else None
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="databus-bench-")
        self._folder = folder or Path(self._temporary.name if self._temporary else "")

    def __enter__(self) -> RelayProcess:
        self.port = free_port()
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"
        folder = self._folder
        folder.mkdir(exist_ok=True)
        config = folder / "databus.toml"
        config.write_text(
            f'[relay]\nlisten = "127.0.0.1:{self.port}"\ndata_dir = "{folder}/relay"\n'
            f"workers = {self.workers}\n"
            f'[[database]]\nname = "gen"\nurl = "{self._source}"\n'
            f"ring_bytes = {self._ring_bytes}\n" + self._sections()
        )
        command = "from databus.cli.main import app; app()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", command, "relay", "-c", str(config)], start_new_session=True
        )
        self._guardian = Guardian(self._process.pid, group=True)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._guardian.release()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _sections(self) -> str:
        if self._tls is None:
            return ""
        files = self._tls.issue("server")
        token = hash_of(TOKEN)
        return (
            f'[http.tls]\ncertificate = "{files.certificate}"\nkey = "{files.key}"\n'
            f'[[auth.tokens]]\nname = "reader"\nhashes = ["{token}"]\n'
            'grants = [{ actions = ["read", "monitor"] }]\n'
        )

    def _get(self, path: str, timeout_s: float) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}"} if self._tls else {}
        request = urllib.request.Request(f"{self.url}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_s, context=self._context) as answer:
            return json.loads(answer.read())

    def range(self) -> dict[str, Any]:
        """The range of SCNs that it serves now."""
        found: dict[str, Any] = self._get("/v1/gen/sources", 5)
        return found

    def worker(self) -> psutil.Process:
        """The process that answers over HTTP."""
        for child in psutil.Process(self._process.pid).children():
            if WORKER_MODULE in child.cmdline():
                return child
        raise RuntimeError("the relay has no worker")

    def status(self) -> dict[str, Any]:
        """What ``/v1/status`` reports about the database."""
        found: dict[str, Any] = self._get("/v1/status", 60)["databases"][0]
        return found

    def _wait(self) -> None:
        deadline = time.monotonic() + self._start_s
        while time.monotonic() < deadline:
            try:
                if self.range()["max"]["scn"] >= self._until_scn:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise TimeoutError(
            f"the relay has not reached scn {self._until_scn} within {self._start_s} s"
        )


def anonymous_bytes(process: psutil.Process) -> int:
    """Memory of a process that is no file's, shared pages in part."""
    for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) << 10
    return int(process.memory_full_info().pss)
