"""scripts/setup.sh where something is missing: its messages, what it does instead, its end."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from databus.common.compiled.kernel_cache import forget_stale

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup.sh"
TOOLS = ("bash", "dirname", "flock", "sed", "head", "cat", "sha256sum", "apt-get", "apt-cache")

PRETENDED_PYTHON = """#!/bin/sh
printf '%s\\n' "python $*" >>"{log}"
case "$*" in *"config list"*) printf "%s\\n" ":env:.index-url='http://mirror/simple'" ;; esac
"""
PRETENDED_UV = """#!/bin/sh
printf '%s\\n' "uv $UV_DEFAULT_INDEX $*" >>"{log}"
exit {code}
"""


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


@pytest.mark.parametrize("uv_code", [0, 2])
def test_uv_installs_from_where_pip_would_and_pip_itself_where_uv_fails(
    bare_machine: Path, uv_code: int
) -> None:
    folder, log = bare_machine / ".venv" / "bin", bare_machine / "calls.log"
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/constraints.txt"):
        (bare_machine / name).touch()
    (bare_machine / "programs" / "env").symlink_to(shutil.which("env") or "/usr/bin/env")
    (bare_machine / "programs" / "tail").symlink_to(shutil.which("tail") or "/usr/bin/tail")
    for name, text in (("python", PRETENDED_PYTHON), ("uv", PRETENDED_UV)):
        (folder / name).write_text(text.format(log=log, code=uv_code))
        (folder / name).chmod(0o755)
    done = run_setup(bare_machine)
    assert done.returncode == 0, done.stderr
    packages = [line for line in log.read_text().splitlines() if ".[all,dev,docs]" in line]
    assert packages[0].startswith("uv http://mirror/simple pip install"), packages
    by_pip = [line for line in packages if line.startswith("python -m pip install")]
    assert len(by_pip) == (uv_code != 0), packages
    assert ("uv could not" in done.stderr) == (uv_code != 0)
    assert (bare_machine / ".venv" / ".setup-stamp").exists()


def test_numbas_cache_is_dropped_when_a_kernel_or_its_constants_have_changed(
    tmp_path: Path,
) -> None:
    """A function of one module contains what it called of another's, which numba does not
    notice."""
    called = tmp_path / "common" / "databus" / "common" / "called.py"
    retained = tmp_path / "relay" / "databus" / "relay" / "__pycache__" / "caller.run-1.py311.nbi"
    for path in (called, retained):
        path.parent.mkdir(parents=True)
    called.write_text("@jit\ndef one(): return 1\n")

    def forgotten() -> bool:
        retained.touch()
        forget_stale(tmp_path / room / "databus" for room in ("common", "relay"))
        return not retained.exists()

    assert [forgotten(), forgotten()] == [True, False]
    called.write_text("@jit\ndef one(): return 2\n")
    assert [forgotten(), forgotten()] == [True, False]
    constants = called.with_name("constants.py")
    constants.write_text("PLACE = 1\n")
    called.write_text("from databus.common import constants\n@jit\ndef one(): return 2\n")
    assert [forgotten(), forgotten()] == [True, False]
    constants.write_text("PLACE = 2\n")
    assert [forgotten(), forgotten()] == [True, False]
