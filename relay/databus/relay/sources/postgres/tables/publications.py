"""What a publication publishes of each table, and whether it did so without a gap.

A table that is not published completely (a row filter, a list of columns, missing operations, a
time outside of the publication) is suspended.  The catalogue has the present publication.  A
change of it in between is visible in the versions of its rows, because each ALTER PUBLICATION
writes new ones.  Pure; ``postgres_catalogue`` queries the server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from databus.relay.sources.postgres.tables.postgres_tables import PostgresTable, quote
from databus.relay.sources.postgres.tables.table_definitions import (
    Definition,
    DefinitionGap,
    change_between,
    stored_definition,
)

# xmin is the transaction that wrote the row.
PUBLICATION_SQL = """
SELECT p.oid::bigint AS oid, p.xmin::text AS version, p.puballtables AS all_tables,
       p.pubviaroot AS via_root, pg_catalog.pg_has_role(p.pubowner, 'USAGE') AS is_owner,
       p.pubinsert AS "insert", p.pubupdate AS "update", p.pubdelete AS "delete",
       p.pubtruncate AS "truncate"
FROM pg_catalog.pg_publication p WHERE p.pubname = $1
"""

# Not the view pg_publication_tables, which opens every table, nor pg_get_expr, which PostgreSQL 18
# opens the table for: a table that an application has locked would block the query for all tables.
MEMBERS_SQL = """
SELECT r.prrelid::bigint AS oid, r.oid::text || '.' || r.xmin::text AS version{parts}
FROM pg_catalog.pg_publication_rel r WHERE r.prpubid = $1::bigint::oid
"""
PARTS_SQL = """,
       r.prqual IS NOT NULL AS is_filtered,
       CASE WHEN r.prattrs IS NOT NULL THEN (
           SELECT pg_catalog.array_agg(a.attname::text) FROM pg_catalog.pg_attribute a
           WHERE a.attrelid = r.prrelid AND a.attnum = ANY (r.prattrs::int2[])) END AS columns"""
"""PostgreSQL 15 and later have row filters and lists of columns."""

# Since PostgreSQL 15.
SCHEMAS_SQL = """
SELECT n.nspname AS schema_name, s.oid::text || '.' || s.xmin::text AS version
FROM pg_catalog.pg_publication_namespace s
JOIN pg_catalog.pg_namespace n ON n.oid = s.pnnspid WHERE s.pnpubid = $1::bigint::oid
"""

# The partitions with rows, and the file of each, which changes with a TRUNCATE.  A partition that
# was created as one got its row type and its parent in one statement, which increases the command
# id of the transaction by two.  A partition that was attached can have had rows before, even if
# the same transaction created it.
PARTITIONS_SQL = """
SELECT pg_catalog.pg_partition_root(c.oid)::oid::bigint AS root, c.oid::bigint AS oid,
       pg_catalog.pg_relation_filenode(c.oid)::bigint AS file,
       n.nspname || '.' || c.relname AS source, c.xmin::text AS version,
       NOT (t.xmin = i.xmin AND i.cmin::text::int8 - t.cmin::text::int8 <= 3) AS was_attached
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_type t ON t.oid = c.reltype
JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid
WHERE c.relispartition AND c.relkind = 'r'
"""

OPERATIONS = ("insert", "update", "delete", "truncate")
_FRESH_SENDERS_SINCE = {14: 18, 15: 13, 16: 9, 17: 5}


def has_fresh_senders(major: int, minor: int) -> bool:
    """Whether the senders of this version of PostgreSQL notice that a publication was altered
    beside open transactions."""
    fixed_in = _FRESH_SENDERS_SINCE.get(major)
    return major >= 18 or (fixed_in is not None and minor >= fixed_in)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a table is not published completely, and the statement that fixes it.

    ``is_absent``: the table is not in the publication.
    """

    what: str
    cure: str
    is_absent: bool = False

    def __str__(self) -> str:
        return f"{self.what}; {self.cure}"


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition; ``file`` has its rows, ``version`` is that of its catalogue row."""

    source: str
    file: int
    version: str
    was_attached: bool


@dataclass(frozen=True, slots=True)
class Member:
    """A table's entry in a publication, with its columns (None: all).

    ``is_filtered``: it has a row filter.
    """

    version: str
    is_filtered: bool = False
    columns: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication as it is on the server.

    ``members`` are its tables' entries by oid, ``schemas`` the versions of its schemas by name,
    ``partitions`` those of partitioned tables, by the oids of root and partition.
    """

    name: str
    version: str
    is_owner: bool
    all_tables: bool
    via_root: bool
    left_out: tuple[str, ...]
    members: Mapping[int, Member] = field(default_factory=dict)
    partitions: Mapping[int, Mapping[int, Partition]] = field(default_factory=dict)
    schemas: Mapping[str, str] = field(default_factory=dict)

    def has(self, table: PostgresTable) -> bool:
        """Whether changes of the table, or some of them, are published under its own name."""
        return self._publishes_all(table) or table.oid in self.members

    def _publishes_all(self, table: PostgresTable) -> bool:
        return self.all_tables or table.schema_name in self.schemas

    def publishes_by_schema(self, table: PostgresTable) -> bool:
        """Whether changes are published because the publication has the table's schema."""
        return not self.all_tables and table.oid not in self.members

    def version_of(self, table: PostgresTable) -> str:
        """A text that differs after each change of what is published of the table."""
        schema = self.schemas.get(table.schema_name)
        by_schema = f"/{schema}" if schema else ""
        member = self.members.get(table.oid)
        return f"{self.version}/{member.version if member else ''}{by_schema}"

    def was_altered(self, known: PublishedTable) -> bool:
        """Whether the publication itself is another one than at the table's last check, and not
        only its entry of the table."""
        return known.version.partition("/")[0] != self.version

    def files_of(self, table: PostgresTable) -> dict[int, int]:
        """The files of the table's partitions by their oids."""
        found = self.partitions.get(table.oid, {})
        return {oid: partition.file for oid, partition in found.items()}

    def problem(self, table: PostgresTable) -> Problem | None:
        """Why not all of the table's changes are published; None if they are."""
        alter = f"ALTER PUBLICATION {quote(self.name)}"
        publication = f"the publication {self.name}"
        if self.left_out:
            return Problem(
                f"{publication} leaves out every {' and '.join(self.left_out)}",
                f"{alter} SET (publish = 'insert, update, delete, truncate')",
            )
        if table.is_partitioned and not self.via_root:
            return Problem(
                f"{publication} gives its partitions' changes under their own names",
                f"{alter} SET (publish_via_partition_root = true)",
            )
        if self._publishes_all(table):
            return None
        published = self.members.get(table.oid)
        if published is None:
            return Problem(f"{publication} lacks it", f"{alter} ADD TABLE {table.only}", True)
        columns = published.columns
        again = f"{alter} DROP TABLE {table.only}; {alter} ADD TABLE {table.only}"
        if published.is_filtered:
            return Problem(f"{publication} gives only some of its rows (WHERE)", again)
        missing = [c.name for c in table.columns if columns is not None and c.name not in columns]
        if missing:
            return Problem(f"{publication} lacks its columns {', '.join(missing)}", again)
        return None


def publication_of(
    name: str,
    row: Any,
    members: Iterable[Any],
    schemas: Iterable[Any],
    partitions: Iterable[Any],
) -> Publication:
    """The publication in the rows of PUBLICATION_SQL, MEMBERS_SQL, SCHEMAS_SQL, PARTITIONS_SQL."""
    by_root: dict[int, dict[int, Partition]] = {}
    for found in partitions:
        by_root.setdefault(found["root"], {})[found["oid"]] = Partition(
            found["source"], found["file"], found["version"], found["was_attached"]
        )
    return Publication(
        name=name,
        version=f"{row['oid']}.{row['version']}",
        is_owner=row["is_owner"],
        all_tables=row["all_tables"],
        via_root=row["via_root"],
        left_out=tuple(operation for operation in OPERATIONS if not row[operation]),
        members={member["oid"]: _member(member) for member in members},
        partitions=by_root,
        schemas={schema["schema_name"]: schema["version"] for schema in schemas},
    )


def _member(row: Any) -> Member:
    columns = row.get("columns")
    return Member(
        row["version"],
        bool(row.get("is_filtered")),
        None if columns is None else frozenset(columns),
    )


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table that was published completely at the last check: its oid, the version, the files of
    its partitions, and its definition (None: it was not read)."""

    oid: int
    version: str
    files: Mapping[int, int] = field(default_factory=dict)
    definition: Definition | None = None


GONE, FORGOTTEN = "gone", "forgotten"
"""Versions of a table that was dropped or renamed, before and after its copies were emptied."""
NO_OID = 0


@dataclass(frozen=True, slots=True)
class Renewal:
    """What the stream waits for before it is connected again; 0: for nothing.

    First ``open_xid``: every transaction below it has ended.  Then ``passed_scn``: the stream has
    every commit up to it.  Then the next stream begins at ``begin_scn``.
    """

    open_xid: int = 0
    passed_scn: int = 0
    begin_scn: int = 0

    @property
    def is_pending(self) -> bool:
        """Whether the stream that is connected now may lack changes."""
        return bool(self.open_xid or self.passed_scn or self.begin_scn)

    @property
    def cure(self) -> str:
        """What must be done before a suspended table can be read; "": nothing."""
        if not self.is_pending:
            return ""
        return "Let the transactions end that were open when the publication was altered"

    def to_json(self) -> list[int]:
        """For the resume state."""
        return [self.open_xid, self.passed_scn, self.begin_scn]


@dataclass(frozen=True, slots=True)
class PublishedTables:
    """The publication at the last check, by source; None: not known yet."""

    tables: Mapping[str, PublishedTable] | None = None
    renewal: Renewal = Renewal()

    def renewed(self, **changes: int) -> PublishedTables:
        """The same, with these changes of ``renewal``."""
        return replace(self, renewal=replace(self.renewal, **changes)) if changes else self

    def of(self, source: str) -> PublishedTable | None:
        """The table of this name; None: there was none."""
        return (self.tables or {}).get(source)

    def knows(self, table: PostgresTable) -> bool:
        """Whether the same table was published before."""
        known = self.of(table.source)
        return known is not None and known.oid == table.oid

    def is_gone(self, source: str) -> bool:
        """Whether the table of this name was dropped, and its copies are not emptied yet."""
        return self._version(source) == GONE

    def is_forgotten(self, source: str) -> bool:
        """Whether the table of this name was dropped, and its copies were emptied."""
        return self._version(source) == FORGOTTEN

    def gone(self, source: str, version: str = GONE) -> PublishedTables:
        """The same without the dropped table of this name: the next one is another table."""
        return replace(
            self, tables={**(self.tables or {}), source: PublishedTable(NO_OID, version)}
        )

    def _version(self, source: str) -> str | None:
        known = self.of(source)
        return known.version if known is not None else None

    @property
    def oids(self) -> dict[str, int]:
        """The oid of each source."""
        return {source: published.oid for source, published in (self.tables or {}).items()}

    def repartitioned(self, before: PublishedTables) -> str:
        """A table whose partitions are others than before; "": there is none."""
        earlier = before.tables or {}
        for source, now in (self.tables or {}).items():
            known = earlier.get(source)
            parts = known.files.keys() if known and known.oid == now.oid else set[int]()
            if now.files.keys() != parts:
                return source
        return ""

    def moved(
        self, table: PostgresTable, publication: Publication, definition: Definition | None
    ) -> dict[int, str]:
        """The files of the same table that may have other rows than at the last check: the versions
        of their rows in pg_class, by the oids of the table or its partitions."""
        known = self.of(table.source)
        if known is None or known.oid != table.oid:
            return {}
        parts = publication.partitions.get(table.oid, {})
        found = {oid: parts[oid].version for oid in _other_files(known.files, parts)}
        # The server refuses SET UNLOGGED for a table that a publication names.
        may_be_unlogged = not (table.is_partitioned or table.oid in publication.members)
        before = known.definition if may_be_unlogged else None
        if before and definition and before.horizon and before.is_moved(definition):
            found[table.oid] = definition.version
        return found

    def gap(
        self,
        table: PostgresTable,
        publication: Publication,
        definition: Definition | None = None,
        moved: Collection[int] = (),
    ) -> DefinitionGap | None:
        """What may be missing of a table that is published completely now; None: nothing.
        ``moved``: its files, by oid, that may have other rows than before."""
        if self.tables is None:
            return None
        known, name = self.tables.get(table.source), publication.name
        why = ""
        if known is None:
            why = f"rows that it had before it joined the publication {name} have no events"
        elif known.oid != table.oid:
            why = "it was dropped and created again: rows that went with it have no events"
        elif known.version != publication.version_of(table):
            why = f"the publication {name} was altered, and changes may not have been published"
        elif publication.publishes_by_schema(table) and _is_renamed(known.definition, definition):
            why = (
                f"it may have been in another schema, whose changes the publication {name} does "
                "not give"
            )
        if known is None or why:
            return DefinitionGap(why, rows_remain=False)
        change = self.change(table, definition)
        why = _moved(known.files, publication.partitions.get(table.oid, {}), moved)
        if table.oid in moved:
            why = (
                "ALTER TABLE has written it to another file: what was written to it while it was "
                "UNLOGGED has no events"
            )
        if change is None:
            return DefinitionGap(why, rows_remain=False) if why else None
        return DefinitionGap(change.why, rows_remain=change.rows_remain and not why)

    def change(self, table: PostgresTable, definition: Definition | None) -> DefinitionGap | None:
        """How the rows of the same table may have changed with its definition; None if not."""
        known = self.of(table.source)
        if known is None or known.oid != table.oid or not (known.definition and definition):
            return None
        return change_between(known.definition, definition)

    def after(
        self,
        whole: Iterable[PostgresTable],
        publication: Publication,
        definitions: Mapping[int, Definition] = MappingProxyType({}),
    ) -> PublishedTables:
        """The same, with the present publication of these tables, and their definitions by oid."""
        now = {
            t.source: PublishedTable(
                t.oid,
                publication.version_of(t),
                publication.files_of(t),
                definitions.get(t.oid) or self._definition(t),
            )
            for t in whole
        }
        return replace(self, tables={**(self.tables or {}), **now})

    def _definition(self, table: PostgresTable) -> Definition | None:
        known = self.of(table.source)
        return known.definition if known is not None and known.oid == table.oid else None

    def redefined(self, table: PostgresTable, definition: Definition) -> PublishedTables:
        """The same, with another definition of this table and its files."""
        known = (self.tables or {})[table.source]
        files = {oid: definition.files.get(oid, file) for oid, file in known.files.items()}
        before = known.definition
        if before is not None:  # The next check finds out whether it was renamed or unlogged.
            definition = replace(
                definition, naming=before.naming, toast=before.toast, horizon=before.horizon,
                files=definition.files if definition.is_partitioned else before.files,
            )  # fmt: skip
        published = replace(known, files=files, definition=definition)
        return replace(self, tables={**(self.tables or {}), table.source: published})

    def with_partitions(self, leaves: Mapping[int, int]) -> PublishedTables:
        """The same, with partitions into which rows of a root were written, and the oids of the
        roots.  A partition that is missing at the next check was removed with its rows."""
        parts: dict[int, dict[int, int]] = {}
        for leaf, root in leaves.items():
            parts.setdefault(root, {})[leaf] = leaf  # its first file
        now = {
            source: replace(known, files={**parts[known.oid], **known.files})
            for source, known in (self.tables or {}).items()
            if known.oid in parts
        }
        return replace(self, tables={**(self.tables or {}), **now}) if now else self

    def lost(self, sources: Iterable[str]) -> PublishedTables:
        """The same, as if the publication had been altered for these tables."""
        known = self.tables or {}
        gone = {source: replace(known[source], version="") for source in sources}
        return replace(self, tables={**known, **gone})

    def without(self, tables: Iterable[PostgresTable]) -> PublishedTables:
        """The same, as if these tables had never been published."""
        gone = {table.source for table in tables}
        left = {
            name: published for name, published in (self.tables or {}).items() if name not in gone
        }
        return replace(self, tables=left)

    def to_json(self) -> Any:
        """For the resume state."""
        if self.tables is None:
            return None
        return {
            source: [
                published.oid,
                published.version,
                {str(oid): file for oid, file in published.files.items()},
                published.definition.to_json() if published.definition else None,
            ]
            for source, published in self.tables.items()
        }


def _is_renamed(known: Definition | None, now: Definition | None) -> bool:
    return known is not None and now is not None and known.is_renamed(now)


def _other_files(known: Mapping[int, int], now: Mapping[int, Partition]) -> list[int]:
    """The partitions whose rows are in another file than before, by oid."""
    # its first file
    return [oid for oid, part in now.items() if part.file != known.get(oid, oid)]


def _moved(known: Mapping[int, int], now: Mapping[int, Partition], moved: Collection[int]) -> str:
    """The rows that a partition added or removed without events; "" if there are none."""
    gone = known.keys() - now.keys()
    if gone:
        return f"{len(gone)} of its partitions were detached or dropped, whose rows have no events"
    for oid in now.keys() - known.keys():
        if now[oid].was_attached:
            return f"its partition {now[oid].source} was attached, whose rows have no events"
    for oid in moved:
        if oid in now:
            return (
                f"its partition {now[oid].source} was truncated or rewritten, of which there is no "
                "event"
            )
    return ""


def decode_published(document: Any, renewal: Any) -> PublishedTables:
    """Read the results of ``to_json``; ``renewal``: None in states of earlier versions.

    Raises:
        ValueError, TypeError, AttributeError: it is something else.
    """
    waits = Renewal(*(int(one) for one in renewal or ()))
    if document is None:
        return PublishedTables(renewal=waits)
    return PublishedTables(
        {
            str(source): _stored(*stored)  # Earlier versions stored no definition.
            for source, stored in document.items()
        },
        waits,
    )


def _stored(oid: Any, version: Any, files: Any, definition: Any = None) -> PublishedTable:
    return PublishedTable(
        int(oid),
        str(version),
        {int(part): int(file) for part, file in files.items()},
        stored_definition(definition) if definition is not None else None,
    )
