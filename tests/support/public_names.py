"""What each room exports, as the text that tests/public_names.txt holds still.

``python -m tests.support.public_names > tests/public_names.txt`` writes it again.
"""

from __future__ import annotations

import importlib
from pathlib import Path

ROOMS = ("bootstrap", "cli", "client", "common", "relay")
LOCK_PATH = Path(__file__).parent.parent / "public_names.txt"


def public_names() -> str:
    """One line for each public name: ``databus.<room> <name>``, sorted."""
    lines = [
        f"databus.{room} {name}\n"
        for room in ROOMS
        for name in sorted(importlib.import_module(f"databus.{room}").__all__)
    ]
    return "".join(lines)


if __name__ == "__main__":
    print(public_names(), end="")
