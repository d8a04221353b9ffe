"""The table of each source, and the name of each table in the stream.

A Relation message has the name of the table at that LSN.  The relay reads the catalogue at
intervals: it can miss a table that is renamed, or exists, for a moment.  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping


class TableNames:
    """Which table each source is, and the name of each table in the stream.

    Without ``known``, a source is every table that has its name.  ``leaves`` maps partitions that
    received rows of a root to the root; the owner takes them out.

    Invariants:
        I1. A source is one table at a time: it has no changes of another table with its name.
        I2. A source is a table only after a discovery has found that table.

    Owner: the assembler.
    """

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        self._has_known = known is not None
        self._oids: dict[str, int] = {}
        self._sources: dict[int, set[str]] = {}
        self._described: dict[int, str] = {}
        self._last_described: int | None = None
        self.leaves: dict[int, int] = {}
        self.add_found(known or {})

    def add_found(self, found: Mapping[str, int]) -> bool:
        """Record the tables that a discovery found; returns whether a source is new.

        A source that is known stays the table that it is.
        """
        new = {source: oid for source, oid in found.items() if source not in self._oids}
        for source, oid in new.items():
            self.assign(source, oid)
        return bool(new)

    def assign(self, source: str, oid: int) -> bool:
        """From now on the source is this table; returns whether that is a change."""
        before = self._oids.get(source)
        if before == oid:
            return False
        if before is not None:
            self._sources[before].discard(source)
        self._oids[source] = oid
        self._sources.setdefault(oid, set()).add(source)
        return True

    def describe(self, oid: int, name: str) -> None:
        """Record a Relation message: from now on the table has this name in the stream."""
        self._described[oid] = name
        self._last_described = oid

    @property
    def expects_change(self) -> bool:
        """Whether the last message was a Relation: its table, or its root, changes next."""
        return self._last_described is not None

    def on_change(self, *oids: int) -> dict[str, str]:
        """Record the message after a Relation; ``oids`` is the table that it changes, if any.

        Returns the sources that miss this change, with the reason.  pgoutput describes a partition
        before a change that comes under its root: a source that is the partition misses it.
        """
        leaf, self._last_described = self._last_described, None
        if leaf is None or not oids or leaf in oids:
            return {}
        (oid,) = oids
        self.leaves[leaf] = oid
        root = self._described.get(oid)
        why = f"rows were written to it while it was a partition of {root}"
        return dict.fromkeys(self._sources.get(leaf, ()), why)

    def is_table_of(self, source: str, oid: int) -> bool:
        """Whether the source is this table."""
        return self._oids.get(source, None if self._has_known else oid) == oid

    def missed_by(self, oid: int) -> dict[str, str]:
        """The sources that miss the next change of this table, with the reason."""
        name = self._described.get(oid)
        found = {
            source: f"rows were written to it while its name was {name}"
            for source in self._sources.get(oid, ())
            if name not in (None, source)
        }
        if self._has_known and name is not None and name not in self._oids:
            found[name] = "rows were written to it before the relay had found it in the catalogue"
        return found
