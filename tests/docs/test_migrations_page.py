"""The page about migrations shows what the command prints."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import RunCommand, databus
from tests.support.snippets import ROOT, blocks

__all__ = ["databus"]

PAGE = ROOT / "docs" / "operations" / "migrations.md"


def test_the_check_of_the_page_prints_what_the_page_shows(
    databus: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(blocks("migrations.md", PAGE.read_text()))
    at = next(index for index, one in enumerate(found) if "--schemas" in one.text)
    monkeypatch.chdir(Path(ROOT / "examples" / "migrations"))
    done = databus(*shlex.split(found[at].text)[1:])
    assert done.code == 5
    assert done.out == found[at + 1].text
