"""Compile the kernels once, so that no first start has to wait for it.

Numba keeps what it compiled beside the source.  A module with compiled loops has a function
``warm_up`` that calls each of them on next to nothing; this script calls them all.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("common", "relay", "client", "bootstrap")


def main() -> None:
    for room in ROOMS:
        for path in sorted((ROOT / room / "databus" / room).rglob("*.py")):
            if re.search(r"^def warm_up\(\)", path.read_text(), re.MULTILINE):
                parts = path.relative_to(ROOT / room).with_suffix("").parts
                importlib.import_module(".".join(parts)).warm_up()


if __name__ == "__main__":
    main()
