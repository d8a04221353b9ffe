"""The table of each source, and the name of each table in the stream.

pgoutput describes a table by the name that it has at that position of the log.  The relay reads
the catalogue at intervals.  So it misses a table that is renamed for a moment, and one that
exists for a moment.  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping


class TableNames:
    """The tables' oids by the sources that they are, and the names that the stream has for them.

    Without ``known`` every table is the one that is meant by its name.  ``leaves`` are the
    partitions that changes of their roots went to, with the roots, until the owner takes them.

    Invariants:
        I1. A source is one table at a time: changes of another one under its name are not its.
        I2. A source is no table unless a look at the catalogue has found it.

    Owner: the assembler.
    """

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        self._is_known = known is not None
        self._oids: dict[str, int] = {}
        self._sources: dict[int, set[str]] = {}
        self._described: dict[int, str] = {}
        self._last: int | None = None
        self.leaves: dict[int, int] = {}
        self.meet(known or {})

    def meet(self, found: Mapping[str, int]) -> bool:
        """Record the tables that a look at the catalogue found: new names are theirs.

        Whether any is.
        """
        new = {source: oid for source, oid in found.items() if source not in self._oids}
        for source, oid in new.items():
            self.assign(source, oid)
        return bool(new)

    def assign(self, source: str, oid: int) -> bool:
        """The source is this table from now on; whether it was another one."""
        before = self._oids.get(source)
        if before == oid:
            return False
        if before is not None:
            self._sources[before].discard(source)
        self._oids[source] = oid
        self._sources.setdefault(oid, set()).add(source)
        return True

    def describe(self, oid: int, name: str) -> None:
        """The stream's changes of this table come under this name from now on."""
        self._described[oid] = name
        self._last = oid

    @property
    def is_described_for(self) -> bool:
        """Whether the next change shows what the last description was for."""
        return self._last is not None

    def changed(self, *oids: int) -> dict[str, str]:
        """A change of this table comes, or of none that it names first.  The sources that lack
        it, and why: those that are the table which was described for it, as its partition."""
        leaf, self._last = self._last, None
        if leaf is None or not oids or leaf in oids:
            return {}
        (oid,) = oids
        self.leaves[leaf] = oid
        root = self._described.get(oid)
        why = f"rows were written to it while it was a partition of {root}"
        return dict.fromkeys(self._sources.get(leaf, ()), why)

    def is_meant(self, source: str, oid: int) -> bool:
        """Whether changes of this table are those of the source."""
        return self._oids.get(source, None if self._is_known else oid) == oid

    def strays(self, oid: int) -> dict[str, str]:
        """The sources that lack the next change of this table, and why."""
        name = self._described.get(oid)
        found = {
            source: f"rows were written to it while its name was {name}"
            for source in self._sources.get(oid, ())
            if name not in (None, source)
        }
        if self._is_known and name is not None and name not in self._oids:
            found[name] = "rows were written to it before the relay had found it in the catalogue"
        return found
