"""Why a table stops alone here: what a change of it means cannot be known."""

from __future__ import annotations

import re
from collections.abc import Iterable

from databus.common.errors import UnsupportedChange


class TableUncertain(UnsupportedChange):
    """What a change of one table means cannot be known; those of other tables can."""

    code = "table_uncertain"
    hint = "The table has stopped alone; see docs/failover.md for how it is synchronised again."


def named_in(statement: str, tables: Iterable[tuple[str, str]]) -> list[str]:
    """The sources whose table's name is a word of a statement; ``tables`` are (source, name)."""
    words = set(re.findall(r"[\w$]+", statement.lower()))
    return [source for source, name in tables if name.lower() in words]
