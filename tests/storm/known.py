"""Faults that are known, and for which a run does not fail."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("known.toml")


@dataclass(frozen=True, slots=True)
class KnownFault:
    """One entry of the file.

    ``pattern`` is looked for in the kind, the table and the details of what failed, ``script`` in
    the statements of the minimal script.  ``products`` has the servers with the fault.
    """

    products: frozenset[str]
    why: str
    pattern: re.Pattern[str]
    script: re.Pattern[str] | None


class KnownFaults:
    """The file's entries."""

    def __init__(self, path: Path = FILE) -> None:
        entries: list[dict[str, Any]] = tomllib.loads(path.read_text()).get("fault", [])
        self._faults = [
            KnownFault(
                frozenset(entry["products"]),
                entry["why"],
                re.compile(entry["pattern"], re.DOTALL),
                re.compile(entry["script"], re.DOTALL | re.IGNORECASE)
                if "script" in entry
                else None,
            )
            for entry in entries
        ]

    def why(self, product: str, found: Exception, script: str = "") -> str:
        """What is known of a failure; "" if it is new."""
        for fault in self._faults:
            if product not in fault.products or not fault.pattern.search(_text(found)):
                continue
            if fault.script is None or fault.script.search(script):
                return fault.why
        return ""


def _text(found: Exception) -> str:
    return "; ".join([str(found), *getattr(found, "details", [])])
