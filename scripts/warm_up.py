"""Compile the kernels once, so that no first start has to wait for it.

Numba keeps what it compiled beside the source.  A module with compiled loops has a function
``warm_up`` that calls each of them on next to nothing; this script calls them all.

Numba looks at the file of a function alone: one that uses another module's functions or constants
would keep what those were.  So all is forgotten here when any of these modules has changed.
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
IMPORTED = re.compile(r"^ *from (databus[\w.]*) import (\w+)", re.MULTILINE)
HAS_WARM_UP = re.compile(r"^def warm_up\(\)", re.MULTILINE)
CONTENT = "kernels.sha256"


def main() -> None:
    forget_stale(ROOT)
    for room, path in modules(ROOT):
        if HAS_WARM_UP.search(path.read_text()):
            importlib.import_module(module_name(ROOT / room, path)).warm_up()


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """The modules of all rooms."""
    for room in ROOMS:
        for path in sorted((root / room / "databus" / room).rglob("*.py")):
            yield room, path


def module_name(folder: Path, path: Path) -> str:
    """What an import calls the module of a file below the folder of its room."""
    return ".".join(path.relative_to(folder).with_suffix("").parts)


def forget_stale(root: Path) -> None:
    """Delete what numba has kept, unless the kernels and what they import are as they were then."""
    texts = {module_name(root / room, path): path.read_text() for room, path in modules(root)}
    used = {name for name, text in texts.items() if COMPILED.search(text)}
    for name in tuple(used):
        for package, member in IMPORTED.findall(texts[name]):
            used |= {package, f"{package}.{member}"} & texts.keys()
    content = hashlib.sha256()
    for name in sorted(used):
        content.update(f"{name}\n{texts[name]}".encode())
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
