"""Running the command line in the test's own process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from databus.cli.main import app


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


RunCommand = Callable[..., Done]


@pytest.fixture
def databus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """``databus("status", url)`` is what the console script does, up to its exit code."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["databus", *map(str, arguments)])
        capsys.readouterr()
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as ended:
                app()
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)
        printed = capsys.readouterr()
        return Done(int(ended.value.code or 0), printed.out, printed.err)

    return run
