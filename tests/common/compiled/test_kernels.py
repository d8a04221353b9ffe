"""Compiling the kernels: once for each installation, and not in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import PATIENCE

PROGRAM = """
import numpy as np
from databus.common.compiled import kernels
assert kernels.load_u16(np.array([1, 2, 3], dtype=np.uint8), 1) == 0x302
assert kernels.load_u32(np.array([1, 0, 0, 0], dtype=np.uint8), 0) == 1
"""


def test_the_first_start_reports_that_it_compiles_and_the_next_one_does_not(tmp_path: Path) -> None:
    logged = [_stderr(tmp_path) for _ in range(2)]

    assert logged[0].count("compiling loops for this processor") == 1, logged[0]
    assert logged[1] == ""


def _stderr(cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60 * PATIENCE,
    )
    return done.stderr
