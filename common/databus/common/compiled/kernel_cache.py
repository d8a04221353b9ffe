"""The compiled kernels on disk: whether they are there, and compiling all of them at once.

Numba stores compiled code beside the source, or in the user's cache if that folder is read-only.
Each module with kernels has a function ``warm_up`` that calls every one of them with minimal
input; ``compile_all`` calls all of these functions.  ``python -m
databus.common.compiled.kernel_cache`` runs ``compile_all`` in a process of its own.

Numba's cache checks only the file of the function itself.  It would reuse a function although
another module's functions or constants that it uses have changed.  So ``compile_all`` deletes
numba's cache files when any of these modules has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import databus
from databus.common.private import make_folder, private_opener
from databus.common.processes.parent_process import end_with

_KERNEL = re.compile(r"^@(kernels\.)?jit|@intrinsic", re.MULTILINE)
_IMPORTED = re.compile(r"^ *from (databus[\w.]*) import (\([^)]*\)|[^\n(]+)", re.MULTILINE)
_HAS_WARM_UP = re.compile(r"^def warm_up\(\)", re.MULTILINE)


def is_compiled() -> bool:
    """Whether ``compile_all`` has run for these sources, this numba and this processor.

    True without numba: there is nothing to compile.  Neither numba nor a kernel is imported.
    """
    try:
        return _stamp(_content(_texts(_folders()))).exists()
    except metadata.PackageNotFoundError:
        return True


def compile_all() -> None:
    """Compile every kernel of every installed room; takes up to two minutes, once."""
    texts = _texts(_folders())
    forget_stale(_folders())
    for name, text in texts.items():
        if _HAS_WARM_UP.search(text):
            importlib.import_module(name).warm_up()
    stamp = _stamp(_content(texts))
    make_folder(stamp.parent)
    with open(stamp, "w", opener=private_opener):
        pass


def forget_stale(folders: Iterable[Path]) -> None:
    """Delete numba's cache files if the kernels, or the modules that they import, have changed.

    ``folders`` hold the rooms' packages: relay/databus and so on, or one folder for all.
    Files that only an administrator may delete stay: numba does not write there either.
    """
    folders = tuple(folders)
    content = _content(_texts(folders))
    room = next(path for folder in folders if (path := folder / "common").is_dir())
    noted = room / "__pycache__" / "kernels.sha256"
    if noted.exists() and noted.read_text() == content:
        return
    with contextlib.suppress(PermissionError):
        for folder in folders:
            for cached in folder.rglob("__pycache__/*.nb[ic]"):
                cached.unlink()
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text(content)


def _folders() -> list[Path]:
    return sorted(Path(path) for path in databus.__path__)


def _texts(folders: Iterable[Path]) -> dict[str, str]:
    """The text of each module of ours, by its import name."""
    return {
        ".".join(("databus", *path.relative_to(folder).with_suffix("").parts)): path.read_text()
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }


def _content(texts: dict[str, str]) -> str:
    """A hash of the modules that have kernels, and of those that they import."""
    # A substring search first: searching for line beginnings takes ten times as long.
    named = [name for name, text in texts.items() if "jit" in text or "@intrinsic" in text]
    used = {name for name in named if _KERNEL.search(texts[name])}
    for name in tuple(used):
        for package, members in _IMPORTED.findall(texts[name]):
            whole = {package, *(f"{package}.{member}" for member in re.findall(r"\w+", members))}
            used |= whole & texts.keys()
    content = hashlib.sha256()
    for name in sorted(used):
        content.update(f"{name}\n{texts[name]}".encode())
    return content.hexdigest()


def _stamp(content: str) -> Path:
    """The file that marks these kernels as compiled for this installation.

    Raises:
        PackageNotFoundError: numba is not installed.
    """
    versions = (sys.version, metadata.version("numba"), metadata.version("llvmlite"))
    made_for = (content, sys.prefix, *versions, _processor(), *map(str, _folders()))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "databus" / f"kernels-{hashlib.sha256(repr(made_for).encode()).hexdigest()[:16]}"


def _processor() -> list[str]:
    """What numba compiles for: the name and the features of the first processor."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    names = ("model name", "flags", "CPU part", "Features")
    return [line for line in lines if line.startswith(names)]


def main() -> int:
    """``PARENT_PID``: compile, and end with the parent.  ``--check``: 1 if not yet compiled."""
    arguments = sys.argv[1:]
    if arguments == ["--check"]:
        return 0 if is_compiled() else 1
    if arguments:
        os.nice(5)  # A server runs beside it.
        if not end_with(int(arguments[0])):
            return 0
    compile_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
