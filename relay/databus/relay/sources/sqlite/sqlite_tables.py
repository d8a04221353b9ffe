"""The captured tables of an SQLite database: updates their triggers when definitions change.

A change of a definition can change a table's rows, and no trigger fires for it.  Such a table is
suspended; the reason is recorded in the transaction that makes its new triggers.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from databus.common.schema.source_names import join_source, split_source
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.configured_keys import ConfiguredKeys
from databus.relay.sources.contract import Finding
from databus.relay.sources.sqlite import sqlite_log as log
from databus.relay.sources.sqlite import sqlite_replacements as replacements
from databus.relay.sources.sqlite import sqlite_triggers as triggers
from databus.relay.sources.sqlite.sqlite_replacements import Conflict
from databus.relay.sources.sqlite.sqlite_triggers import Trigger

_HOLD_S = 0.02
_PAUSE_S = 0.1
"""How long one of our transactions adds tables, and the pause before the next one: a statement that
waits for SQLite's lock tries again after 1, 2, 5, .. and at most 100 ms."""
_TRANSACTIONS = 10
_HOLD_MANY_S = 0.1
"""About how many transactions take in all tables, if they are many: after each one every connection
reads all definitions again.  A transaction is longer for that, but no longer than this."""
_MANY = 100
"""With more tables than this, triggers are written as rows of ``sqlite_master``: each CREATE
TRIGGER reads all definitions there."""
_SUSPENDED = "suspended "
_WATCHED = "watched "
"""Names in ``databus_meta``: why a source is suspended, and on which page its table begins."""
_DEFINITIONS = "definitions"
"""In ``databus_meta``: the database's ``schema_version`` when the definitions were compared last.
Each DDL statement raises it."""
_OBJECTS = "objects"
"""In ``databus_meta``: the definitions of then except ours, as a list of type and name."""
_STATEMENTS_OF_READDING = 2
_STATEMENTS_OF_REBUILDING = 6
_STATEMENTS_OF_INDEXING = 2

FILLED_BEFORE = (
    "it was created, or took this name, with rows that were written before it had triggers"
)
UNWATCHED = (
    "it had no triggers for a while (it was rebuilt, or left out), so changes written meanwhile "
    "are not known"
)
KEYLESS = "it has no key any more: create it with a PRIMARY KEY, or name one in keys"
INDEXED = (
    "rows were written after it got a unique index, and before the relay had seen it: REPLACE may "
    "have removed other rows"
)
INDEXED_BRIEFLY = (
    "rows were written between statements that may have created a unique index and dropped it: "
    "REPLACE may have removed other rows"
)
REBUILT = "it was rebuilt, its triggers included: changes written meanwhile are not known"


@dataclass(frozen=True, slots=True)
class _Definitions:
    """The definitions of a database at one ``schema_version``.

    ``pages``: the first page of each table.  ``schemas``: of each captured table.
    ``versions``: number and document of each source's latest version in the log.  ``named`` and
    ``held``: our triggers by name, and those of each table.  ``conflicts``: over what REPLACE
    may remove rows of each table.  ``obstacles``: why others cannot be captured.
    """

    pages: Mapping[str, int] = field(default_factory=dict)
    schemas: Mapping[str, SourceSchema] = field(default_factory=dict)
    versions: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    named: Mapping[str, Trigger] = field(default_factory=dict)
    held: Mapping[str, list[Trigger]] = field(default_factory=dict)
    conflicts: Mapping[str, list[Conflict]] = field(default_factory=dict)
    obstacles: Mapping[str, str] = field(default_factory=dict)

    def texts(self, table: str) -> dict[str, str]:
        """The texts of our triggers on a table, by name."""
        return {trigger.name: trigger.text for trigger in self.held.get(table, ())}

    def wanted(self, table: str, version: int) -> dict[str, str]:
        """The triggers that a captured table needs, by name."""
        return triggers.wanted(self.schemas[table], version, self.conflicts[table])


@dataclass(frozen=True, slots=True)
class Unseen:
    """A change of a table that the log does not show.

    ``rows_remain``: each row still exists under its key, with other values.
    """

    why: str
    rows_remain: bool = False


class CapturedTables:
    """Which tables are captured, and what their triggers write.

    Invariants:
        I1. A change that the log does not show is recorded in the transaction that makes the
            table's new triggers, until ``settled``.
        I2. A write transaction is short, and the pause before the next one lets the application
            write and read the definitions again: our transactions fail none of its statements.
        I3. While ``is_current``, the rows of the log up to a ``last_id`` that was read before were
            written by triggers of the versions that they name.

    Owner: the thread that reads the log.
    Durability: when ``refresh`` returns, its changes are as durable as the database.
    Raises: sqlite3.Error.
    """

    def __init__(
        self,
        captures: Callable[[str], bool],
        keys: ConfiguredKeys,
        *,
        recursive_triggers: bool = False,
    ) -> None:
        self.search = replacements.search(recursive_triggers=recursive_triggers)
        self._recursive_triggers = recursive_triggers
        self._captures = captures
        self._keys = keys
        self._changed: list[str] = []
        self._new: list[str] = []
        self._doubts: dict[str, Unseen] = {}
        self._objects: set[tuple[str, str]] | None = None
        self._found_objects: set[tuple[str, str]] | None = None
        self._planned_version = self._version = -1
        self._defined = _Definitions()
        self._is_direct = False
        self._least = 1
        self._prepared: dict[str, tuple[int, dict[str, str]]] = {}
        self.next_refresh_s = 0.0
        self.resumes = False
        """Whether consumers have earlier rows; otherwise no table is suspended."""
        self.has_unseen = True

    def schemas(self, db: sqlite3.Connection) -> list[SourceSchema]:
        """The definitions of all captured tables as they are now."""
        return [schema for _, schema, _, why in self._examined(db) if not why]

    def findings(self, db: sqlite3.Connection) -> Iterator[Finding]:
        """The tables that cannot be captured: REPLACE may remove their rows unseen."""
        for _, schema, _, why in self._examined(db):
            if why:
                name = schema.source
                yield Finding(f"table {name}", why, replacements.CURE, table=name)

    def _examined(
        self, db: sqlite3.Connection
    ) -> Iterator[tuple[str, SourceSchema, list[Conflict], str]]:
        """All tables with keys: the schema, its conflicts, and why it cannot be captured."""
        for table in filter(self._captures, log.user_tables(db)):
            schema = log.table_schema(db, table, self._keys)
            if schema is not None:
                conflicts, unknown = self.search(db, table, schema)
                yield table, schema, conflicts, replacements.obstacle(table, unknown)

    def in_step(self, db: sqlite3.Connection) -> bool:
        """Whether all triggers match the definitions."""
        return log.schema_version(db) == self._version

    def is_current(self, db: sqlite3.Connection) -> bool:
        """Whether the existing triggers write all columns of their tables."""
        return log.schema_version(db) == self._planned_version and not self._changed

    def refresh(self, db: sqlite3.Connection, position: int) -> bool:
        """Update some tables' triggers in a short transaction; whether all are up to date.

        The log up to ``position`` was read.  A table's capture begins or changes in the
        transaction that makes its triggers.
        """
        # A window whose end was recorded was written before a definition changed.  This also reads
        # changed definitions again, before the transaction that the application waits for.
        since_id = max(position, log.meta(db, "window_end"))
        if log.schema_version(db) != self._planned_version:
            self._plan(db, since_id)
        due = [*self._changed, *self._new]
        if due:
            self._prepare(db, due)
            count, held_s = self._step(db, due, since_id)
            self._new = self._new[max(0, count - len(self._changed)) :]
            self._changed = self._changed[count:]
            self._pause(db, held_s)  # the next one, if there is more to do
        if not (self._changed or self._new) and log.schema_version(db) == self._planned_version:
            self._version = self._planned_version
        return self.in_step(db)

    def _plan(self, db: sqlite3.Connection, since_id: int) -> None:
        """Find the tables whose triggers do not match their definitions."""
        self._planned_version = log.schema_version(db)
        missing = triggers.first_missing(db, since_id)
        self._defined = defined = self._read(db)
        self._changed, self._new = [], []
        watched = log.metas(db, _WATCHED)
        # A table that has lost its triggers was dropped and created again.
        lost = defined.pages.keys() - defined.held
        remade = [name for name in map(_unmarked, watched) if name in lost]
        unexplained, created = self._unexplained(db, len(remade))
        hidden = (
            unexplained - log.index_count(db, remade, besides=created) - _altered_columns(defined)
        )
        self._doubts.clear()
        is_doubtful = hidden >= _STATEMENTS_OF_INDEXING and not self._recursive_triggers
        for table, schema in defined.schemas.items():
            version, document = defined.versions.get(schema.source, (0, ""))
            if is_doubtful and log.has_events(db, schema, since_id):
                self._doubts[table] = Unseen(INDEXED_BRIEFLY)
            if not version:
                self._new.append(table)
            elif version in missing or json.loads(document) != schema.to_json():
                self._changed.append(table)
            else:
                is_moved = watched.get(_WATCHED + table) != defined.pages[table]
                doubt = _doubt(db, schema, version, unexplained, since_id, is_moved=is_moved)
                if doubt is not None:
                    self._doubts.setdefault(table, doubt)
                if (
                    table in self._doubts
                    or is_moved
                    or defined.texts(table) != defined.wanted(table, version)
                ):
                    self._changed.append(table)
        gone = {*map(_unmarked, watched)} | defined.held.keys()
        self._changed += sorted(gone - defined.schemas.keys())
        if log.schema_version(db) != self._planned_version:  # A part of this was read later.
            self._planned_version, self._changed, self._new = -1, [], []
            return
        self._is_direct = len(self._changed) + len(self._new) > _MANY
        if self._is_direct:
            due = [*self._changed, *self._new]
            wanted = {name: defined.wanted(name, 0) for name in due if name in defined.schemas}
            triggers.compile_all(wanted)
            names = [name for texts in wanted.values() for name in texts]
            self._is_direct = not triggers.has_name_of_another(db, names)
        self._least = -(-len(self._changed + self._new) // _TRANSACTIONS)
        self._prepared = {}
        if not (self._changed or self._new) and log.meta(db, _DEFINITIONS) != self._planned_version:
            log.write_briefly(db, partial(self._compared, db, self._planned_version))

    def _read(self, db: sqlite3.Connection) -> _Definitions:
        held: dict[str, list[Trigger]] = {}
        for trigger in triggers.ours(db):
            held.setdefault(trigger.table, []).append(trigger)
        examined = list(self._examined(db))
        return _Definitions(
            log.user_tables(db),
            {table: schema for table, schema, _, why in examined if not why},
            log.latest_versions(db),
            {triggers.folded(one.name): one for of_table in held.values() for one in of_table},
            held,
            {table: conflicts for table, _, conflicts, _ in examined},
            {table: f"{why}; {replacements.CURE}" for table, _, _, why in examined if why},
        )

    def _unexplained(self, db: sqlite3.Connection, remade_count: int) -> tuple[int, set[str]]:
        """The number of DDL statements whose effect the definitions do not show, at the most, and
        the names of the objects that are new.

        ``remade_count``: how many tables were dropped and created again under their names.
        """
        before = log.meta(db, _DEFINITIONS)
        objects = log.other_objects(db)
        explained, created = 2 * remade_count, set()
        if self._objects is None and (noted := log.metas(db, _OBJECTS).get(_OBJECTS)):
            self._objects = {(kind, name) for kind, name in json.loads(str(noted))}
        if self._objects is not None:
            added, gone = objects - self._objects, self._objects - objects
            created = {name for _, name in added}
            # One statement drops or renames a virtual table with all tables that it consists of.
            parts = _parts(gone)
            dropped = sum(kind in ("table", "view") for kind, _ in gone) - len(parts)
            if parts:
                added -= _parts(added)
            # At the most: each of these has a name that another table had before.
            renamed = remade_count + sum(kind == "table" for kind, _ in added)
            explained += len(added) + max(0, dropped - renamed)
        self._found_objects = objects
        return (self._planned_version - before - explained if before else 0), created

    def _compared(self, db: sqlite3.Connection, version: int) -> None:
        """Record that the definitions of this ``schema_version`` were compared."""
        log.set_meta(db, _DEFINITIONS, version)
        self._objects = self._found_objects
        log.set_meta(db, _OBJECTS, json.dumps(sorted(self._objects or ())))

    def _prepare(self, db: sqlite3.Connection, due: list[str]) -> None:
        """Make the texts of the next transaction before it holds the lock."""
        defined, version = self._defined, log.last_version(db)
        before, self._prepared = self._prepared, {}
        for table in due[: self._least] if self._is_direct else ():
            if table in defined.schemas:
                known = defined.versions.get(join_source("main", table), (0, ""))[0]
                version += not known
                expected = known or version
                found = before.get(table, (0, {}))
                if found[0] != expected:
                    found = expected, defined.wanted(table, expected)
                self._prepared[table] = found

    def _step(self, db: sqlite3.Connection, due: list[str], since_id: int) -> tuple[int, float]:
        """Update the triggers of the first of these tables, as many as the time limit allows:
        (how many, seconds)."""
        if not self._is_direct:
            work = partial(self._bring_in_step, db, due, since_id)
            return log.write_briefly(db, work)
        with triggers.definitions_writable(db) as self._is_direct:
            work = partial(self._bring_in_step, db, due, since_id)
            return log.write_briefly(db, work)

    def _bring_in_step(
        self, db: sqlite3.Connection, due: list[str], since_id: int
    ) -> tuple[int, float]:
        began_s, count, least = time.monotonic(), 0, self._least if self._is_direct else 1
        if log.schema_version(db) == self._planned_version:  # else it is planned again
            while count < len(due) and (
                not count
                or time.monotonic() - began_s < (_HOLD_MANY_S if count < least else _HOLD_S)
            ):
                self._watch(db, due[count], since_id)
                count += 1
            self._planned_version = log.schema_version(db) + self._is_direct
            if count >= len(self._changed):
                self._compared(db, self._planned_version)
            if self._is_direct:
                triggers.publish(db, self._planned_version)
        return count, time.monotonic() - began_s

    def _watch(self, db: sqlite3.Connection, table: str, since_id: int) -> None:
        defined = self._defined
        schema = defined.schemas.get(table)
        if schema is None:
            self._unwatch(db, table)
            return
        version, document = defined.versions.get(schema.source, (0, ""))
        held = defined.texts(table)
        unseen = None
        if not version:
            version = log.put_version(db, schema, None)
            if log.has_rows(db, table):
                unseen = Unseen(FILLED_BEFORE)
        else:
            before = SourceSchema.from_json(json.loads(document))
            if triggers.events(held) != triggers.events(triggers.wanted(schema, version)):
                if before != schema:
                    version = log.put_version(db, schema, log.last_id(db))
                if log.has_rows(db, table):
                    unseen = Unseen(UNWATCHED)
                else:
                    log.log_emptied(db, version)
            else:
                version, unseen = _altered(db, version, before, schema, since_id)
                is_covered = replacements.cover(held, defined.conflicts[table])
                if not is_covered and log.has_events(db, schema, since_id):
                    self._doubts[table] = Unseen(INDEXED)
                doubt = self._doubts.get(table)
                if doubt and (not unseen or (unseen.rows_remain and not doubt.rows_remain)):
                    unseen = doubt
        expected, texts = self._prepared.get(table, (0, {}))
        wanted = texts if expected == version else defined.wanted(table, version)
        self._create(db, wanted, table)
        log.set_meta(db, _WATCHED + table, defined.pages[table])
        if unseen is not None:
            self._suspend(db, schema.source, unseen, since_id)

    def _create(self, db: sqlite3.Connection, wanted: dict[str, str], table: str) -> None:
        defined = self._defined
        if not self._is_direct:
            triggers.watch(db, wanted, table)
        elif defined.texts(table) != wanted:
            names = map(triggers.folded, wanted)
            elsewhere = [defined.named[name] for name in names if name in defined.named]
            triggers.put(db, wanted, table, [*defined.held.get(table, ()), *elsewhere])

    def _unwatch(self, db: sqlite3.Connection, table: str) -> None:
        """End a table's capture: it was dropped or renamed, has no key, is not configured, or
        REPLACE may remove its rows unseen."""
        triggers.drop(db, table)
        is_watched = db.execute(
            "DELETE FROM databus_meta WHERE name = ?", (_WATCHED + table,)
        ).rowcount
        if not is_watched or not self._captures(table):
            return
        source = join_source("main", table)
        if table in self._defined.pages:
            why = self._defined.obstacles.get(table, KEYLESS)
            self._suspend(db, source, Unseen(why), log.last_id(db))
        else:
            log.log_emptied(db, self._defined.versions.get(source, (0, ""))[0])

    def _suspend(self, db: sqlite3.Connection, source: str, unseen: Unseen, since_id: int) -> None:
        if not self.resumes:
            return
        if not unseen.rows_remain:
            triggers.forget(db, source, since_id)
        elif (before := self.unseen(db).get(source)) is not None and not before.rows_remain:
            unseen = before  # Rows are gone too.
        log.set_meta(db, _SUSPENDED + source, json.dumps([unseen.why, unseen.rows_remain]))
        self.has_unseen = True

    def _pause(self, db: sqlite3.Connection, held_s: float) -> None:
        """Pause for several times the duration of the application's next statement.

        All connections, ours too, read all definitions again after each of our transactions.  A
        statement that finds them changed fifty times in a row fails.
        """
        began_s = time.monotonic()
        log.last_version(db)
        is_more = self._changed or self._new
        pause_s = max(_PAUSE_S, 2 * held_s, 2 * (time.monotonic() - began_s)) if is_more else 0.0
        self.next_refresh_s = began_s + pause_s

    # -- what the log does not show

    def unseen(self, db: sqlite3.Connection) -> dict[str, Unseen]:
        """Changes that the log does not show, by source, until they are ``settled``."""
        found = log.metas(db, _SUSPENDED)
        self.has_unseen = bool(found)
        return {
            name.removeprefix(_SUSPENDED): Unseen(*json.loads(str(document)))
            for name, document in found.items()
        }

    def settled(self, db: sqlite3.Connection, unseen: Mapping[str, Unseen]) -> None:
        """Delete these records: the caller has stored the suspensions on disk."""
        self.has_unseen = True

        def forget() -> None:
            for source in unseen:
                db.execute("DELETE FROM databus_meta WHERE name = ?", (_SUSPENDED + source,))

        log.write_briefly(db, forget)


def _unmarked(name: str) -> str:
    return name.removeprefix(_WATCHED)


def _parts(objects: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those that may be parts of another one: the tables of a virtual table have its name before
    an underscore."""
    names = {name for kind, name in objects if kind == "table"}

    def is_part(name: str) -> bool:
        return any(name[:at] in names for at, letter in enumerate(name) if letter == "_")

    return {("table", name) for name in names if is_part(name)}


def _altered_columns(defined: _Definitions) -> int:
    """How many ALTER TABLE statements the columns of tables show, at the least.

    A table without its own triggers was created or renamed: its columns show no statement.
    """
    count = 0
    for table, schema in defined.schemas.items():
        version, document = defined.versions.get(schema.source, (0, ""))
        if version and defined.texts(table).keys() & defined.wanted(table, version).keys():
            earlier = SourceSchema.from_json(json.loads(document))
            before = [column.name for column in earlier.columns]
            now = [column.name for column in schema.columns]
            gone, added = set(before) - set(now), set(now) - set(before)
            exchanged = 2 if not gone | added and before != now else 0
            count += max(len(gone), len(added), exchanged)
    return count


def _altered(
    db: sqlite3.Connection, version: int, old: SourceSchema, new: SourceSchema, since_id: int
) -> tuple[int, Unseen | None]:
    """Compare a table that still has its triggers with its last version; its version now.

    Rows that the old triggers logged after ``since_id`` lack the newer columns.  They are logged
    once more with their present values.
    """
    first = triggers.first_missing(db, since_id).get(version)
    names = {column.name for column in new.columns}
    dropped = [at for at, column in enumerate(old.columns) if column.name not in names]
    is_exact = _only_dropped(old, new) and len(old.columns) <= log.GROUP
    if first is not None and not is_exact:
        unseen: Unseen | None = Unseen("a column was dropped while rows were written")
    else:
        unseen = _unseen(db, split_source(new.source)[1], old, new)
    if old == new:
        return version, unseen
    number = log.put_version(db, new, log.last_id(db) if first is None else first - 1)
    if first is not None and unseen is None:
        triggers.without_missing(db, version, number, first, dropped)
    elif old.key == new.key:
        _log_again(db, new, split_source(new.source)[1], number, version, since_id)
    return number, unseen


def _log_again(
    connection: sqlite3.Connection,
    schema: SourceSchema,
    table: str,
    version: int,
    old_version: int,
    since_id: int,
) -> None:
    """Log the rows that triggers of ``old_version`` have logged after ``since_id`` once more, as
    they are now."""
    names = [column.name for column in schema.columns]
    old = log.registered(connection)[old_version]
    keys = set()
    with log.texts_as_bytes(connection):
        rows = connection.execute(
            "SELECT new FROM databus_log WHERE id > ? AND version = ? AND new IS NOT NULL",
            (since_id, old_version),
        ).fetchall()
    for (new,) in rows:
        try:
            cells = log.parse_row(new.decode())
        except UnicodeDecodeError:
            continue  # Where it comes in the stream its table stops.
        row = dict(zip((column.name for column in old.columns), cells, strict=True))
        if all(name in row for name in schema.key):
            keys.add(tuple(row[name] for name in schema.key))
    condition = log.has_key(connection, schema)
    expression = log.row_expression(names)
    for key in keys:
        connection.execute(
            f"INSERT INTO databus_log (at_ms, version, op, old, new) SELECT {log.NOW_MS}, "
            f"{version}, 'u', {expression}, {expression} FROM {log.quoted(table)} "
            f"WHERE {condition}",
            key,
        )


def _doubt(
    db: sqlite3.Connection,
    schema: SourceSchema,
    version: int,
    unexplained: int,
    since_id: int,
    *,
    is_moved: bool,
) -> Unseen | None:
    """What DDL statements without a visible effect may have done to an unchanged table.

    They may have dropped the last column and added it again.  Then all rows have its default
    value, except those written since.
    """
    table, column = split_source(schema.source)[1], schema.columns[-1]
    if is_moved and unexplained >= _STATEMENTS_OF_REBUILDING:
        return Unseen(REBUILT)
    if unexplained < _STATEMENTS_OF_READDING or column.name in schema.key:
        return None
    default = log.defaults(db, table)[column.name]
    if (default is None and not column.nullable) or not log.has_rows(db, table):
        return None
    (written,) = db.execute(
        "SELECT count(*) FROM databus_log WHERE id > ? AND version = ?", (since_id, version)
    ).fetchone()
    if not log.has_only_defaults(db, table, column.name, default, written):
        return None
    return Unseen(f"column {column.name} may have been dropped and added again", rows_remain=True)


def _only_dropped(old: SourceSchema, new: SourceSchema) -> bool:
    """Whether a table lost columns and is otherwise the same."""
    names = {column.name for column in new.columns}
    remaining = [column for column in old.columns if column.name in names]
    return (
        old.key == new.key and len(remaining) < len(old.columns) and list(new.columns) == remaining
    )


def _unseen(
    db: sqlite3.Connection, table: str, old: SourceSchema, new: SourceSchema
) -> Unseen | None:
    """What a new definition did to a table's rows; None if it only dropped columns or added
    columns without values."""
    if old == new or _only_dropped(old, new) or not log.has_rows(db, table):
        return None
    if old.key != new.key:
        return Unseen(f"its key was ({', '.join(old.key)}), and is ({', '.join(new.key)})")
    if new.columns[: len(old.columns)] != old.columns:
        return Unseen("columns were renamed, or others added when some were dropped", True)
    defaults = log.defaults(db, table)
    for name in (column.name for column in new.columns[len(old.columns) :]):
        if defaults[name] is not None:
            return Unseen(f"ADD COLUMN {name} gave its rows the value {defaults[name]}", True)
    return None
