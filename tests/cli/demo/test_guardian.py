"""The guardian kills when its owner dies, and only then."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from databus.cli.demo.guardian import Guardian
from tests.support.waiting import PATIENCE


@pytest.fixture
def patient() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["/bin/sh", "-c", "read _"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_the_end_of_its_pipe_kills_the_process(patient: subprocess.Popen[bytes]) -> None:
    guardian = Guardian(patient.pid)
    shell = guardian._shell
    assert shell is not None
    assert shell.stdin is not None
    shell.stdin.close()  # what the kernel does when the owner dies
    assert patient.wait(10 * PATIENCE) == -9
    guardian.release()


def test_a_released_guardian_is_gone_and_has_killed_no_process(
    patient: subprocess.Popen[bytes],
) -> None:
    guardian = Guardian(patient.pid)
    shell = guardian._shell
    guardian.release()
    guardian.release()
    assert shell is not None
    assert shell.poll() == -9
    assert patient.poll() is None
