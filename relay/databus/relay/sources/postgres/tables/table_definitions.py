"""The effects of a table's definition on the values of its existing rows.

``ALTER TABLE ... ADD COLUMN ... DEFAULT`` gives every row a value and has no row events.  Such a
statement is visible in the catalogue afterwards: in the numbers, types and row versions of the
table's columns, and in the file with its rows.  A comparison of two definitions of a table shows
whether its rows can have other values.  A new file alone is no sign: VACUUM FULL writes one, too.
Pure; ``postgres_catalogue`` queries the server.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from databus.relay.sources.postgres.tables.postgres_tables import BELOW

# One statement, and so one snapshot: a new column is read together with the file that has its
# values.  Files are read as columns of pg_class, because the functions that return them ignore the
# statement's snapshot.  The types of a column include all types that its type depends on.
DEFINITIONS_SQL = (
    """
SELECT c.oid::bigint AS oid, c.relkind = 'p' AS is_partitioned,
       c.reltoastrelid::bigint AS toast, c.xmin::text AS version,
       pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text::bigint AS horizon,
       (SELECT r.xmin::text FROM pg_catalog.pg_type r WHERE r.oid = c.reltype) AS naming,
       (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(
                   a.attnum, a.attname, a.atttypid::bigint, a.xmin::text, a.attgenerated <> '',
                   a.atthasmissing, d.oid::bigint) ORDER BY a.attnum)::text
        FROM pg_catalog.pg_attribute a
        LEFT JOIN pg_catalog.pg_attrdef d
             ON a.atthasdef AND d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped) AS columns,
       CASE WHEN c.relkind = 'p' THEN (
           SELECT pg_catalog.json_object_agg(l.oid::bigint, l.relfilenode::bigint ORDER BY l.oid)
           FROM """
    + BELOW
    + """ p
           JOIN pg_catalog.pg_class l ON l.oid = p.relid WHERE l.relkind <> 'p')
       ELSE pg_catalog.json_build_object(c.oid::bigint, c.relfilenode::bigint) END::text AS files,
       CASE WHEN c.relkind = 'p' THEN (
           SELECT pg_catalog.json_agg(DISTINCT a.attname::text)
           FROM """
    + BELOW
    + """ p
           JOIN pg_catalog.pg_attribute a ON a.attrelid = p.relid AND a.atthasmissing
                AND NOT a.attisdropped)
       END::text AS filled,
       (WITH RECURSIVE used(oid) AS (
            SELECT a.atttypid FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND a.atttypid >= 16384
            UNION
            SELECT d.refobjid FROM used u
            JOIN pg_catalog.pg_type t ON t.oid = u.oid
            CROSS JOIN LATERAL (
                SELECT o.refobjid FROM pg_catalog.pg_depend o
                WHERE o.classid = 'pg_catalog.pg_type'::regclass AND o.objid = t.oid
                  AND o.refclassid = 'pg_catalog.pg_type'::regclass
                UNION ALL
                SELECT o.refobjid FROM pg_catalog.pg_depend o
                WHERE o.classid = 'pg_catalog.pg_class'::regclass AND o.objid = t.typrelid
                  AND o.refclassid = 'pg_catalog.pg_type'::regclass
            ) d)
        SELECT pg_catalog.json_object_agg(t.oid::bigint, CASE t.typtype
            WHEN 'e' THEN (
                SELECT pg_catalog.json_object_agg(e.oid::bigint, e.xmin::text ORDER BY e.oid)
                FROM pg_catalog.pg_enum e WHERE e.enumtypid = t.oid)
            ELSE (
                SELECT pg_catalog.json_agg(a.atttypid::bigint ORDER BY a.attnum)
                FROM pg_catalog.pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0)
            END ORDER BY t.oid)
        FROM used u JOIN pg_catalog.pg_type t ON t.oid = u.oid AND t.typtype IN ('e', 'c')
       )::text AS types
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_toast%'
  AND ($1::bigint IS NULL OR c.oid = $1::bigint::oid)
"""
)

_TEXTS = frozenset({25, 1043})
"""text and varchar, whose values have the same form."""
_FIRST_OF_USERS = 16384


@dataclass(frozen=True, slots=True)
class DefinitionGap:
    """Why existing rows may have other values.

    ``rows_remain``: each row still exists under its key.  ``waits_for``: what must be done before
    the table can be read; empty: nothing.
    """

    why: str
    rows_remain: bool = True
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class _Column:
    """``version`` is that of its catalogue row, ``default`` names its default's.

    ``is_missing``: the catalogue has its value for older rows.
    """

    name: str
    type_oid: int
    version: str
    is_generated: bool
    is_missing: bool
    default: int | None


@dataclass(frozen=True, slots=True)
class Definition:
    """A table's definition, as texts that are equal if nothing has changed.

    ``columns`` has the fields of ``_Column`` by column number, ``key`` the numbers of the key's
    columns.  ``files`` is the table's file, or those of its partitions, by oid.  ``filled`` names
    the columns of partitions for whose older rows the catalogue has the value.  ``types`` has the
    labels of enums and the member types of composites that its columns use.  ``naming`` is the
    version of its row type, which changes with the table's name, schema and owner.  ``toast`` is
    the table of its large values (0: none), ``version`` that of its row in pg_class.  Every
    transaction before ``horizon`` had ended when the definition was read (0: not known).
    """

    columns: str
    key: tuple[int, ...]
    files: Mapping[int, int]
    filled: str = ""
    types: str = ""
    is_partitioned: bool = False
    naming: str = ""
    toast: int = 0
    horizon: int = field(default=0, compare=False)
    version: str = field(default="", compare=False)

    def to_json(self) -> list[Any]:
        """For the resume state."""
        files = {str(oid): file for oid, file in self.files.items()}
        return [
            self.columns, self.key, files, self.filled, self.types, self.is_partitioned,
            self.naming, self.toast, self.horizon,
        ]  # fmt: skip

    def is_renamed(self, later: Definition) -> bool:
        """Whether the table may have had another name or schema before ``later``."""
        return "" != self.naming != later.naming

    def is_moved(self, later: Definition) -> bool:
        """Whether the rows are in another file, perhaps written by ALTER TABLE.  That also creates
        a new table of large values; VACUUM FULL, CLUSTER and TRUNCATE do not."""
        return self.files != later.files and not 0 != self.toast == later.toast


def definition_of(row: Mapping[str, Any], key: Collection[str]) -> Definition | None:
    """The definition in a row of DEFINITIONS_SQL; None if the table does not have this key."""
    numbers = {name: number for number, name, *_ in json.loads(row["columns"] or "[]")}
    if not numbers.keys() >= set(key):
        return None
    return Definition(
        row["columns"],
        tuple(numbers[name] for name in key),
        _files(json.loads(row["files"] or "{}")),
        row["filled"] or "",
        row["types"] or "",
        row["is_partitioned"],
        row["naming"] or "",
        row["toast"],
        row["horizon"],
        row["version"],
    )


def stored_definition(document: Any) -> Definition:
    """Read the result of ``to_json``.

    Raises:
        ValueError, TypeError, AttributeError: it is something else.
    """
    stored: list[Any] = list(document)
    stored += ["", 0, 0][len(stored) - 6 :]  # Earlier versions stored fewer fields.
    columns, key, files, filled, types, is_partitioned, naming, toast, horizon = stored
    return Definition(
        str(columns), tuple(map(int, key)), _files(files), str(filled), str(types),
        bool(is_partitioned), str(naming), int(toast), int(horizon),
    )  # fmt: skip


def _files(document: Mapping[str, Any]) -> dict[int, int]:
    return {int(oid): int(file) for oid, file in document.items()}


def _columns(definition: Definition) -> dict[int, _Column]:
    return {int(number): _Column(*rest) for number, *rest in json.loads(definition.columns)}


def change_between(known: Definition, now: Definition) -> DefinitionGap | None:
    """How rows with the definition ``known`` may differ under ``now``; None if they do not."""
    if known == now:
        return None
    before, after = _columns(known), _columns(now)
    revalued = dict(_revalued(known, now, before, after))
    if known.key != now.key:
        names = [
            ", ".join(columns[number].name for number in key)
            for columns, key in ((before, known.key), (after, now.key))
        ]
        return DefinitionGap(f"its key was ({names[0]}) and is ({names[1]})", rows_remain=False)
    of_key = [after[number] for number in now.key]
    # The files of partitions also change with rows that come and go.
    is_moved = now.is_partitioned and _is_rewritten(known, now)
    if revalued:
        in_key = not revalued.keys().isdisjoint(now.key)
        return DefinitionGap("; ".join(revalued.values()), rows_remain=not (is_moved or in_key))
    if why := _types_changed(known.types, now.types):
        in_key = any(column.type_oid >= _FIRST_OF_USERS for column in of_key)
        return DefinitionGap(why, rows_remain=not (is_moved or in_key))
    return None


def _revalued(
    known: Definition, now: Definition, before: Mapping[int, _Column], after: Mapping[int, _Column]
) -> Iterator[tuple[int, str]]:
    """The numbers of columns in which a row may have another value, or for the first time one."""
    is_rewritten = _is_rewritten(known, now)
    filled = set(json.loads(now.filled or "[]"))
    names = {column.name for column in before.values() if not column.is_generated}
    for number, column in after.items():
        if column.is_generated:
            continue
        old, name = before.get(number), column.name
        if old is None:
            if name in names:
                yield number, f"its column {name} is another one of that name"
            elif is_rewritten or column.is_missing or name in filled:
                yield number, f"its column {name} was added with values for the rows there were"
        elif old.is_generated:
            yield number, f"its column {name} is no longer generated"
        elif old.name != name:
            yield number, f"its column {old.name} was renamed to {name}"
        elif old.type_oid != column.type_oid:
            if is_rewritten or not {old.type_oid, column.type_oid} <= _TEXTS:
                yield number, f"its column {name} has another type"
        elif is_rewritten and old.version != column.version and not _is_only_cleared(old, column):
            yield number, f"its column {name} was altered, and the rows were rewritten"


def _is_rewritten(known: Definition, now: Definition) -> bool:
    return any(now.files.get(oid, file) != file for oid, file in known.files.items())


def _is_only_cleared(old: _Column, column: _Column) -> bool:
    """Whether the rows now store the value that the catalogue had for older rows.

    An altered type would also have rewritten the column's default.
    """
    is_cleared = old.is_missing and not column.is_missing
    return is_cleared and column.default is not None and old.default == column.default


def _types_changed(known: str, now: str) -> str:
    """Why values of the columns' types are read differently now; "" if they are not."""
    if known == now:
        return ""
    before, after = json.loads(known or "{}"), json.loads(now or "{}")
    for oid in before.keys() & after.keys():
        old, new = before[oid] or {}, after[oid] or {}
        if isinstance(old, dict) and isinstance(new, dict):
            # No row has an added label yet.
            if not old.items() <= new.items():
                return "a label of an enum in its columns was renamed"
        elif old != new:
            return "a composite type in its columns has other members"
    return ""
