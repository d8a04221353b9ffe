"""``databus demo --cluster``: the leader is killed, and nothing is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.processes import DatabusProcess


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(400)
def test_the_consumers_have_the_source_after_a_kill_and_an_orderly_leave(tmp_path: Path) -> None:
    demo = DatabusProcess(["demo", "--cluster", "--duration", "25"], tmp_path / "demo.log").start()
    try:
        assert demo.wait(120) == 0, demo.log
    finally:
        demo.kill9()
    assert "EQUAL" in demo.log
    assert "is killed (SIGKILL)" in demo.log
    assert "is stopped (SIGTERM)" in demo.log
    epochs = [int(found) for found in re.findall(r"leads with the epoch (\d+)", demo.log)]
    assert len(epochs) == 3
    assert epochs == sorted(set(epochs)), "each leader has an epoch of its own"
