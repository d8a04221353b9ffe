"""What every test gets: the private servers, paths and processes of tests/support."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import hypothesis
import pytest

from databus.common.compiled.kernels import COMPILED

# Where a test takes the kernel's path and the reference's, both must be there to be compared.
assert COMPILED, "numba is missing: make setup installs it"

# A failed assert of the support modules shows its values, as one of a test does.
pytest.register_assert_rewrite("tests.support")
pytest_plugins = ["tests.support.fixtures"]

# Started in the background by a script (`make test &`), SIGINT would be ignored by us and by every
# process that a test ends with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A single example may meet the first call of a compiled kernel: the time-out of the whole test
# is what bounds it.
hypothesis.settings.register_profile("databus", deadline=None, print_blob=True)
hypothesis.settings.load_profile("databus")

# A server of a test does not restart itself in the middle because kernels were edited.
os.environ["DATABUS_COMPILE_FIRST"] = "1"

# Each of the tests' Sparks runs for seconds: it takes its classes from the archive that
# scripts/compile.sh made, where there is one, and compiles quickly instead of well.
_CLASSES = Path(__file__).parents[1] / ".venv" / "spark-classes.jsa"
os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:SharedArchiveFile={_CLASSES} -XX:TieredStopAtLevel=1"

# What the suite has on the disk at once, at most.
_NEEDED_GB = 2.0


def pytest_report_header() -> str:
    """Name the disk, and end before a test fails for the lack of it."""
    folder = tempfile.gettempdir()
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < _NEEDED_GB:
        pytest.exit(
            f"the tests need {_NEEDED_GB:g} GB in {folder}, and {free_gb:.1f} GB are free: remove "
            "something, or set TMPDIR to another disk",
            returncode=2,
        )
    return f"disk: {free_gb:.0f} GB are free in {folder}"
