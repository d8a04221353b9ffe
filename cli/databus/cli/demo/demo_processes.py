"""The demo's child processes: the same commands that an operator runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from databus.cli.demo.guardian import Guardian
from databus.common.errors import InternalError

_STOP_S = 15.0


class DemoProcesses:
    """Databus commands, each with its log in the folder.

    Invariants:
        I1. When the context ends, all started processes have ended.

    Owner: the demo.
    Raises: InternalError from ``check`` if one has ended by itself.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, tuple[subprocess.Popen[bytes], Guardian]] = {}

    def __enter__(self) -> DemoProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        for process, _ in self._running.values():
            process.terminate()
        for process, guardian in self._running.values():
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            guardian.release()

    def start(self, name: str, *arguments: str | Path) -> None:
        """Start ``databus ARGUMENTS`` in a session of its own."""
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", "from databus.cli.main import app; app()", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[name] = (process, Guardian(process.pid, group=True))

    def kill(self, name: str) -> None:
        """SIGKILL to the process and all its children, as if the machine were gone."""
        process, guardian = self._running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        guardian.release()

    def stop(self, name: str) -> None:
        """SIGTERM to the process; it ends by itself."""
        process, guardian = self._running.pop(name)
        process.terminate()
        process.wait(_STOP_S)
        guardian.release()

    def check(self) -> None:
        """Raise if a process has ended."""
        for name, (process, _) in self._running.items():
            if process.poll() is not None:
                log = (self._folder / f"{name}.log").read_text(errors="replace")
                raise InternalError(
                    f"the {name} process ended with code {process.returncode}: {log[-2000:]}"
                )
