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
"""The name of the expression by which a dump orders a table that has no index for its key."""


@dataclass(frozen=True, slots=True)
class ConfiguredKeys:
    """The ``keys`` of a ``[[database]]``; a table's own name has priority over globs."""

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def _configured(self, source: str) -> tuple[str, ...]:
        if source in self.keys:
            return self.keys[source]
        for pattern, columns in self.keys.items():
            if fnmatch.fnmatchcase(source, pattern):
                return columns
        return ()

    def of(self, source: str, columns: Iterable[str]) -> tuple[str, ...]:
        """The key of a table with these columns; empty if none fits it."""
        names = tuple(columns)
        configured = self._configured(source)
        if configured == ("*",):
            return names
        return configured if set(configured) <= set(names) else ()

    def finding(self, source: str, columns: Sequence[str], statement: str) -> Finding:
        """Why a table without a key has no configured key; ``statement`` gives it one."""
        configured = self._configured(source)
        missing = [name for name in configured if name not in columns]
        if configured:
            return Finding(
                f"keys of {source}",
                f"the table has no column {missing[0]!r}; it has {', '.join(columns)}",
                f'correct keys = {{"{source}" = {list(configured)}}}',
                table=source,
            )
        return Finding(
            f"key of {source}",
            "it has no primary key and no unique index without nulls, so its rows cannot be "
            "identified",
            f"{statement}; or name the columns that identify its rows, "
            f'keys = {{"{source}" = ["..."]}} ("*" for all), or leave it out by exclude_sources',
            table=source,
        )


NO_KEYS = ConfiguredKeys()
