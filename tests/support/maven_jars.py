"""Jars of Maven Central that scripts/jars.sh has fetched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

VERSIONS = {"debezium": "3.5.0.Final", "kafka": "4.1.1", "opensearch": "2.19.3"}


def jars_or_skip(name: str) -> Path:
    """The folder of a product's jars; the test is skipped, with the reason, without it."""
    if os.environ.get("DATABUS_TEST_SKIP_SERVERS") == "1":
        pytest.skip("DATABUS_TEST_SKIP_SERVERS=1")
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = Path(cache or Path("~/.cache").expanduser(), "databus-jars")
    found = folder / f"{name}-{VERSIONS[name]}"
    if not found.is_dir():
        pytest.skip(f"there is no {found}: scripts/jars.sh {name} has not fetched it")
    if shutil.which("java") is None:
        pytest.skip("there is no java")
    return found
