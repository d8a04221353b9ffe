"""scripts/setup.sh where something is missing: what it says and with which exit code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup.sh"
TOOLS = ("bash", "dirname", "flock", "sed", "head", "cat", "sha256sum", "apt-get", "apt-cache")


@pytest.fixture
def bare_machine(tmp_path: Path) -> Path:
    """A copy of the script on a machine without Python, Java, sudo and root."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found is not None:
            (programs / name).symlink_to(found)
    (programs / "id").write_text("#!/bin/sh\necho 1000\n")
    (programs / "id").chmod(0o755)
    return tmp_path


def run_setup(machine: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(machine / "programs" / "bash"), str(machine / "scripts" / "setup.sh"), *words],
        env={"PATH": str(machine / "programs"), "HOME": str(machine)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="not a Debian system")
def test_without_root_and_sudo_it_prints_the_command_for_an_administrator(
    bare_machine: Path,
) -> None:
    done = run_setup(bare_machine, "java")
    assert done.returncode == 2, done.stderr
    assert "missing: Python 3.11 or newer with venv" in done.stderr
    assert "missing: Java 17 or newer, for Spark" in done.stderr
    (command,) = [line for line in done.stderr.splitlines() if "apt-get update &&" in line]
    assert "python3-venv openjdk-17-jre-headless" in command
    assert not (bare_machine / ".venv").exists()


def test_without_apt_it_names_the_packages(bare_machine: Path) -> None:
    (bare_machine / "programs" / "apt-get").unlink(missing_ok=True)
    done = run_setup(bare_machine)
    assert done.returncode == 2, done.stderr
    assert "not a Debian system" in done.stderr
    assert "python3-venv" in done.stderr


def test_a_word_it_does_not_know_is_refused(bare_machine: Path) -> None:
    done = run_setup(bare_machine, "oracle")
    assert done.returncode == 1, done.stderr
    assert "unknown word 'oracle'" in done.stderr
