"""Keys that the configuration gives to tables that have none of their own.

``keys = {"shop.log" = ["at", "line"], "shop.raw_*" = "*"}``; "*" is the whole row.  Columns of
such a key may be null, and rows that are equal in it are one row to consumers.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from databus.relay.sources.contract import Finding

ORDER_NAME = "databus key"
"""What a dump calls the expression by which it orders a table that has no index for its key."""


@dataclass(frozen=True, slots=True)
class ConfiguredKeys:
    """The ``keys`` of a ``[[database]]``; a table's own name goes before globs."""

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def _asked(self, source: str) -> tuple[str, ...]:
        if source in self.keys:
            return self.keys[source]
        for pattern, columns in self.keys.items():
            if fnmatch.fnmatchcase(source, pattern):
                return columns
        return ()

    def of(self, source: str, columns: Iterable[str]) -> tuple[str, ...]:
        """The key of a table with these columns; empty if none fits it."""
        names = tuple(columns)
        asked = self._asked(source)
        if asked == ("*",):
            return names
        return asked if set(asked) <= set(names) else ()

    def finding(self, source: str, columns: Sequence[str], statement: str) -> Finding:
        """Why a table without a key has none from here either; ``statement`` gives it one."""
        asked = self._asked(source)
        missing = [name for name in asked if name not in columns]
        if asked:
            return Finding(
                f"keys of {source}",
                f"the table has no column {missing[0]!r}; it has {', '.join(columns)}",
                f'correct keys = {{"{source}" = {list(asked)}}}',
                table=source,
            )
        return Finding(
            f"key of {source}",
            "it has no primary key and no unique index without nulls, so its rows cannot be "
            "told apart",
            f"{statement}; or name the columns that tell its rows apart, "
            f'keys = {{"{source}" = ["..."]}} ("*" for all), or leave it out by exclude_sources',
            table=source,
        )


NO_KEYS = ConfiguredKeys()
