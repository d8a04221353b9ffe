"""scripts/release.sh: it builds only what tag, version, changelog and tree agree about."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What is committed here, as a repository of its own, with this environment."""
    clone = tmp_path / "clone"
    done = run(ROOT, "git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone))
    if done.returncode:
        pytest.skip(f"no repository to clone: {done.stderr}")
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for name in ("user.name", "user.email"):
        run(clone, "git", "config", name, "t")
    # The script as it is here, committed or not.
    (clone / "scripts" / "release.sh").write_bytes((ROOT / "scripts" / "release.sh").read_bytes())
    (clone / "scripts" / "release.sh").chmod(0o755)
    return clone


def commit(clone: Path, tag: str = "") -> None:
    for words in (("add", "-A"), ("commit", "-qm", "release")):
        assert run(clone, "git", *words).returncode == 0
    if tag:
        assert run(clone, "git", "tag", "-f", tag).returncode == 0


def test_a_tag_gives_a_wheel_an_sdist_and_the_context_of_the_image(clone: Path) -> None:
    release = str(clone / "scripts" / "release.sh")
    (clone / "note").write_text("1")  # HEAD may have a tag here.
    commit(clone)
    assert "HEAD has no tag" in run(clone, release).stderr
    assert run(clone, "git", "tag", "v9.9.9").returncode == 0
    done = run(clone, release)
    assert (done.returncode, "pyproject.toml has version" in done.stderr) == (2, True), done.stderr
    project = clone / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "0.1.0"', 'version = "9.9.9"'))
    commit(clone, "v9.9.9")
    assert "no section '## 9.9.9'" in run(clone, release).stderr
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## Unreleased", "## 9.9.9"))
    assert "no section" not in run(clone, release).stderr
    assert "not committed" in run(clone, release).stderr
    commit(clone, "v9.9.9")
    done = run(clone, release)
    assert done.returncode == 0, done.stderr
    built = {path.name for path in (clone / "dist").iterdir()}
    assert built == {
        "databus_cdc-9.9.9-py3-none-any.whl",
        "databus_cdc-9.9.9.tar.gz",
        "databus-9.9.9-image.tar.gz",
    }
    with tarfile.open(clone / "dist" / "databus-9.9.9-image.tar.gz") as context:
        names = context.getnames()
    assert "databus-9.9.9/docker/Dockerfile" in names
    assert not [name for name in names if "/tests/" in name]
