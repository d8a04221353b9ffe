"""SCENARIOS.md names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_scenario_is_tried_by_a_test_that_exists() -> None:
    text = (TESTS / "SCENARIOS.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| `(\S+)::(\w+)` \|$", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 42))
    for number, path, name in rows:
        assert f"def {name}(" in (TESTS / path).read_text(), f"scenario {number}"
