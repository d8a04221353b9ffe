"""Databus processes started as an operator starts them, with their log captured.

Every process gets a session of its own, so that it can be killed together with the
workers and fetchers below it, and is ended at teardown whatever the test did.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from databus.cli.demo.guardian import Guardian
from tests.support.waiting import PATIENCE, eventually_sync

_STOP_DEADLINE_S = 20.0 * PATIENCE
_COMMAND = (sys.executable, "-c", "from databus.cli.main import app; app()")


class DatabusProcess:
    """One ``databus`` command in a process of its own.

    Invariants:
        I1. stdout and stderr go to ``log_path``, appended over restarts.
        I2. After ``stop`` or ``kill9`` no process of its session is left.
        I3. If the test run itself is killed, a guardian kills the process's group.
    Owner: the test that started it.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        """``command`` comes before the arguments: the databus command line by default."""
        self.arguments = [str(argument) for argument in arguments]
        self.command = list(command)
        self.log_path = log_path
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self._guardian: Guardian | None = None

    def start(self) -> DatabusProcess:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.environment,
            )
        self._release_guardian()
        self._guardian = Guardian(self.process.pid, group=True)
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None, "not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or before it was started."""
        return None if self.process is None else self.process.poll()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def descendants(self) -> list[psutil.Process]:
        """All processes below it, the nearest first."""
        try:
            return list(psutil.Process(self.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def wait(self, timeout_s: float = 30.0) -> int:
        """Its exit code, once it ends by itself."""
        assert self.process is not None, "not started"
        try:
            return self.process.wait(timeout_s * PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(
                f"`databus {' '.join(self.arguments)}` still runs after "
                f"{timeout_s * PATIENCE:g} s; its log ends:\n{self.log[-3000:]}"
            ) from error

    def stop(self, signal_number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end and return its exit code; kill -9 if it does not."""
        assert self.process is not None, "not started"
        if self.running:
            self.process.send_signal(signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_DEADLINE_S)
        return self.kill9()

    def kill9(self) -> int:
        """Kill it and everything below it at once."""
        assert self.process is not None, "not started"
        below = self.descendants()
        for one in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.suspend()  # so that none starts a child while the others are killed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for one in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        code = self.process.wait(_STOP_DEADLINE_S)
        self._release_guardian()
        return code

    def _release_guardian(self) -> None:
        if self._guardian is not None:
            self._guardian.release()
            self._guardian = None

    def kill9_alone(self) -> int:
        """Kill only the process itself; its children have to notice."""
        assert self.process is not None, "not started"
        self.process.kill()
        return self.process.wait(_STOP_DEADLINE_S)

    def wait_ready(self, url: str, timeout_s: float = 30.0) -> None:
        """Return when ``GET url`` (for instance .../readyz) answers 200."""

        def answers() -> bool:
            if not self.running:
                code = self.process.returncode if self.process else None
                raise RuntimeError(
                    f"`databus {' '.join(self.arguments)}` ended with exit code {code} "
                    f"before it was ready:\n{self.log[-3000:]}"
                )
            return http_status(url) == 200

        try:
            eventually_sync(answers, timeout_s, f"{url} answers 200", poll_s=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}; its log ends:\n{self.log[-3000:]}") from error


class Processes:
    """Starts databus commands for one test and ends them all after it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[DatabusProcess] = []

    def start(
        self,
        *arguments: str | Path,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> DatabusProcess:
        """``start("relay", "-c", path)`` runs ``databus relay -c path``."""
        label = name or f"{len(self.started)}-{arguments[0] if arguments else 'databus'}"
        process = DatabusProcess(
            arguments, self.directory / f"{label}.log", environment=environment
        )
        self.started.append(process)
        return process.start()

    def start_command(self, command: Sequence[str], *, name: str) -> DatabusProcess:
        """Run any command under the same care."""
        process = DatabusProcess((), self.directory / f"{name}.log", command=command)
        self.started.append(process)
        return process.start()

    def run(
        self,
        *arguments: str | Path,
        timeout_s: float = 50.0,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; stdout and stderr apart."""
        return subprocess.run(
            [*_COMMAND, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s * PATIENCE,
            check=False,
            env={**os.environ, **(environment or {})},
        )

    def end_all(self) -> None:
        for process in reversed(self.started):
            if process.process is not None:
                process.kill9()


def http_status(url: str, timeout_s: float = 10.0 * PATIENCE) -> int | None:
    """The status of a GET, or None while no server answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return None


def wait_process_gone(pid: int, timeout_s: float = 10.0) -> None:
    """Return when a process of this id is gone or a zombie."""
    deadline_s = time.monotonic() + timeout_s * PATIENCE
    while time.monotonic() < deadline_s:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} still runs after {timeout_s:g} s")
