"""Compile the kernels once, so that no first start has to wait for it.

Numba keeps what it compiled beside the source.  A module with compiled loops has a function
``warm_up`` that calls each of them on next to nothing; this script calls them all.

Numba looks at the file of a function alone: one that calls another module's would keep what that
was.  So all is forgotten here when any of them has changed.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("common", "relay", "client", "bootstrap")
COMPILED = re.compile(r"^@(kernels\.)?jit|@intrinsic", re.MULTILINE)
HAS_WARM_UP = re.compile(r"^def warm_up\(\)", re.MULTILINE)
CONTENT = "kernels.sha256"


def main() -> None:
    forget_stale(ROOT)
    for room, path in modules(ROOT):
        if HAS_WARM_UP.search(path.read_text()):
            parts = path.relative_to(ROOT / room).with_suffix("").parts
            importlib.import_module(".".join(parts)).warm_up()


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """The modules of all rooms."""
    for room in ROOMS:
        for path in sorted((root / room / "databus" / room).rglob("*.py")):
            yield room, path


def forget_stale(root: Path) -> None:
    """Delete what numba has kept, unless it was all compiled from the kernels as they are."""
    content = hashlib.sha256()
    for _, path in modules(root):
        if COMPILED.search(text := path.read_text()):
            content.update(f"{path.relative_to(root)}\n{text}".encode())
    noted = root / "common" / "databus" / "common" / "__pycache__" / CONTENT
    if noted.exists() and noted.read_text() == content.hexdigest():
        return
    for room in ROOMS:
        for kept in (root / room).rglob("__pycache__/*.nb[ic]"):
            kept.unlink()
    noted.parent.mkdir(parents=True, exist_ok=True)
    noted.write_text(content.hexdigest())


if __name__ == "__main__":
    main()
