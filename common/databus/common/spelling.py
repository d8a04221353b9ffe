"""What a message about an unknown name adds: the nearest known name, or all of them."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(name: str, names: Collection[str]) -> str:
    """`` (did you mean X?)``, or nothing if no name is near."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


def spelling_advice(name: str, names: Collection[str], what: str = "known are") -> str:
    """``did you mean X?``, or else the list of the names, after ``what``."""
    near = nearest(name, names)
    return near[2:-1] if near else f"{what} {', '.join(names) or 'none'}"
