"""A disk that fails one sync of one file in a real process: a library loaded before libc."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("failing_sync.c")


class FailingSync:
    """Lets the next sync of a file whose path ends with ``path_end`` fail, whenever ``arm``ed.

    Owner: the test; ``environment`` is what the process under test is started with.
    """

    def __init__(self, folder: Path, path_end: str) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("there is no C compiler for the library that lets a sync fail")
        library = folder / "failing_sync.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True
        )
        self.armed = folder / "failing_sync.armed"
        self.environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "FAILING_PATH": path_end,
            "FAILING_AT": str(self.armed),
        }

    def arm(self) -> None:
        """The next sync of the file fails, and none after it."""
        self.armed.touch()

    @property
    def has_failed(self) -> bool:
        """Whether the sync that was armed has failed."""
        return not self.armed.exists()
