"""Servers of other versions: ``scripts/servers.sh`` unpacks them, a variable names their folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "databus-servers"


def use(server: str, folder: Path) -> str:
    """Have a server such as ``postgres-13.18`` started from now on; its product.

    ``folder`` takes a copy for PostgreSQL under root, whose account cannot reach the cache.

    Raises:
        SystemExit: the server cannot be fetched, or is unknown.
    """
    script = Path(__file__).resolve().parents[2] / "scripts/servers.sh"
    if subprocess.run([script, server], stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(2)
    product = server.partition("-")[0]
    root = _CACHE / server
    if product == "postgres" and os.getuid() == 0:
        root = Path(shutil.copytree(root, folder / server, symlinks=True))
    os.environ[f"DATABUS_{product.upper()}_ROOT"] = str(root)
    return product


def number(version: str) -> tuple[int, ...]:
    """A version as numbers: ``(8, 0, 15)`` of ``8.0.15-log``."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
