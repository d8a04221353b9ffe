"""The mirror: the tables of the sources in a database, with the checkpoint in the transaction."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import ClassVar, TypeVar

from databus.client.checkpoints.checkpoint_table import (
    CheckpointTable,
    Steps,
    StoredCheckpoint,
    checked_consumer,
    new_owner,
)
from databus.client.sinks.sink import Sink, SinkContext
from databus.client.sinks.sink_batch import SinkBatch, SinkTable
from databus.client.sinks.sql.net_rows import POSITION, net_rows
from databus.client.sinks.sql.sql_target import MirrorTable, SqlTarget
from databus.client.sinks.sql.table_structures import shared_columns, structure_change
from databus.common.checkpoint import Checkpoint
from databus.common.errors import (
    CheckpointMoved,
    ConfigError,
    DatabusError,
    RowRefused,
    SinkRefused,
    SinkUnavailable,
)
from databus.common.schema.source_schema import SourceSchema
from databus.common.table_state import CaptureState, TableState

T = TypeVar("T")
TABLES = "databus_tables"
_DDL = """\
CREATE TABLE IF NOT EXISTS {name} (
    consumer VARCHAR(190) NOT NULL,
    source VARCHAR(190) NOT NULL,
    target VARCHAR(190) NOT NULL,
    structure {text},
    state VARCHAR(20) NOT NULL,
    since_scn BIGINT NOT NULL,
    reason {text} NOT NULL,
    PRIMARY KEY (consumer, source)
)"""


class SqlMirror(Sink):
    """Maintains each source as a table of the target: the same columns, and ``_scn`` and ``_seq``.

    Delivery: exactly once.  The rows, the states of tables and the checkpoint of a commit are one
    transaction; ``databus_checkpoints`` has the checkpoint, ``databus_tables`` the tables.

    Invariants:
        I1. After each commit of an online checkpoint, every table whose state is followed has the
            rows that its source had at the checkpoint's position.
        I2. A row is never replaced by an older one: each has the position of its last change.
        I3. One process at a time uses a name: the last one that opened it.  Where a definition
            commits, each transaction locks the name first, for it may commit before the checkpoint.
        I4. A table that this sink has not made is not touched, unless it was to be adopted.

    Columns are added, converted and dropped as the source's are.  A definition is not part of the
    transaction where the target commits it at once (MariaDB, MySQL): columns are then added before
    the rows that need them, and dropped after the commit.

    Owner: the sink's thread.
    Durability: the target's, when ``commit`` returns.
    Raises: SinkUnavailable, SinkRefused, CheckpointMoved.
    """

    stores_checkpoint: ClassVar[bool] = True
    default_target: ClassVar[str] = "{table}"

    def __init__(self, target: SqlTarget, *, adopts_tables: bool = False) -> None:
        self._target = target
        self._adopts = adopts_tables
        self._checkpoints = CheckpointTable()
        self._name = self._owner = ""
        self._stored: StoredCheckpoint | None = None
        self._tables: dict[str, MirrorTable] = {}
        # Targets of tables that may have been created although that was not recorded.
        self._begun: set[str] = set()
        # The versions to which tables are reduced once no uncommitted row needs more columns.
        self._wanted: dict[str, SourceSchema] = {}
        self._is_connected = False

    def open(self, context: SinkContext) -> Checkpoint | None:
        """Connect, and claim the name."""
        self._name, self._owner = checked_consumer(context.name), new_owner()
        self._disconnect()

        def opened() -> Checkpoint | None:
            self._target.connect()
            self._run(self._checkpoints.create())
            self._target.ask(_DDL.format(name=TABLES, text=self._target.text_type))
            self._stored = self._run(self._checkpoints.claim(self._name, self._owner))
            self._load_tables()
            self._target.commit()
            self._is_connected = True
            return self._stored.checkpoint

        return self._guarded(opened)

    def write(self, batch: SinkBatch) -> None:
        """Write the last state of each key of the batch."""

        def written() -> None:
            self._connect()
            by_source: dict[str, list[SinkTable]] = {}
            for table in batch.tables():
                by_source.setdefault(table.source, []).append(table)
            groups = [
                [list(group) for _, group in groupby(tables, lambda table: table.schema.key)]
                for tables in by_source.values()
            ]
            for first, *_ in groups:
                self._expand(first)
            for first, *others in groups:
                self._write_rows(first)
                for group in others:
                    self._expand(group)
                    self._write_rows(group)
            if self._target.has_transactional_ddl:
                self._contract()

        self._guarded(written)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint, and commit."""

        def committed() -> None:
            self._connect()
            assert self._stored is not None
            old, written = self._stored.checkpoint, self._stored
            # If a commit was made although it was reported as failed, its rows come again.
            if not (old and old.clock == checkpoint.clock and checkpoint.position < old.position):
                written = self._run(self._checkpoints.put(self._stored, checkpoint))
            self._target.commit()
            self._stored = written
            if self._wanted:
                self._hold()
                self._contract()
                self._target.commit()

        self._guarded(committed)

    def rollback(self) -> None:
        """Close the connection; the next call opens another one."""
        self._disconnect()

    def table_state(self, state: TableState) -> None:
        """Write the state beside the table."""

        def written() -> None:
            self._connect()
            self._record(
                state.source,
                state=str(state.state),
                since_scn=state.since_scn,
                reason=state.reason,
            )

        self._guarded(written)

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()

    def _connect(self) -> None:
        """Open the connection again after a failure, if the name is still this process's.

        Raises:
            CheckpointMoved: another process has claimed it.
        """
        if self._is_connected:
            self._hold()
            return
        self._target.connect()
        self._hold()
        found = self._run(self._checkpoints.row(self._name))
        if found is None or found.owner != self._owner:
            raise CheckpointMoved(
                f"the sink {self._name} was taken over by "
                f"{found.owner if found else 'another process'}"
            )
        self._stored = found
        self._load_tables()
        self._is_connected = True

    def _hold(self) -> None:
        """Lock the name for this transaction, if one may commit before the checkpoint is written.

        Raises:
            CheckpointMoved: another process has claimed it.
        """
        if not self._target.has_transactional_ddl:
            self._run(self._checkpoints.hold(self._name, self._owner))

    def _disconnect(self) -> None:
        self._target.close()
        self._is_connected = False
        self._tables.clear()
        self._wanted.clear()

    def _load_tables(self) -> None:
        answer = self._target.ask(
            f"SELECT source, target, structure FROM {TABLES} WHERE consumer = ?", (self._name,)
        )
        for source, target, structure in answer.rows:
            if structure is not None:
                schema = SourceSchema.from_json(json.loads(structure))
                self._tables[source] = MirrorTable(target, self._target.sql_name(target), schema)
            elif target:
                self._begun.add(target)

    def _expand(self, tables: list[SinkTable]) -> None:
        """Give a target all columns that the rows of these versions have."""
        newest = tables[-1]
        table = self._tables.get(newest.source)
        if table is None:
            self._create(newest)
            table = self._tables[newest.source]
        if table.target != newest.target:
            raise ConfigError(
                f"the sink {self._name} writes {newest.source} to {table.target}, and its route "
                f"says {newest.target}; give the sink another name, or restore the route"
            )
        for one in tables:
            before = table.schema
            change = structure_change(before, one.schema, keeps_columns=True)
            if not change.is_empty:
                fresh = {column.name for column in one.schema.columns}
                kept = tuple(column for column in before.columns if column.name not in fresh)
                schema = replace(one.schema, columns=(*one.schema.columns, *kept))
                table = replace(table, schema=schema)
                if change.is_rekeyed:
                    self._target.rekey(before, table)
                else:
                    self._target.alter(table, change)
                self._remember(newest.source, table)
        if not newest.is_bootstrap:
            self._wanted[newest.source] = newest.schema

    def _contract(self) -> None:
        """Drop the columns that the newest version of a table does not have."""
        for source, schema in self._wanted.items():
            table = self._tables[source]
            change = structure_change(table.schema, schema)
            for column in change.dropped:
                self._target.drop_column(table, column)
            if change.dropped:
                self._remember(source, replace(table, schema=schema))
        self._wanted.clear()

    def _create(self, new: SinkTable) -> None:
        taken = [source for source, table in self._tables.items() if table.target == new.target]
        if taken:
            raise ConfigError(
                f"{new.source} and {taken[0]} both go to {new.target}: give each source a target "
                "of its own, such as target = '{schema}_{table}'"
            )
        self._target.prepare_name(new.target)
        table = MirrorTable(new.target, self._target.sql_name(new.target), new.schema)
        is_there = self._target.has_table(new.target)
        if is_there and new.target in self._begun:
            self._target.ask(f"DROP TABLE {table.sql_name}")
            is_there = False
        if not is_there:
            if not self._target.has_transactional_ddl:
                self._record(new.source, target=new.target)
            self._target.create(table)
        elif not self._adopts:
            raise SinkRefused(
                f"the target has a table {new.target} that the sink {self._name} has not made. "
                "Drop it, give the source another target, or set existing = 'adopt'"
            )
        else:
            self._target.adopt(table)
        self._remember(new.source, table)

    def _write_rows(self, tables: list[SinkTable]) -> None:
        for one in tables:
            table = self._tables[one.source]
            names = shared_columns(one.schema, table.schema)
            for net in net_rows(one):
                if net.truncated is not None:
                    self._target.empty(table, net.truncated)
                if net.deletes is not None:
                    self._target.delete(table, net.deletes)
                if net.upserts is not None:
                    rows = net.upserts.select([*names, *POSITION])
                    are_new = one.is_bootstrap or net.are_inserts
                    self._target.upsert(table, rows, are_new=are_new)
                for changed, rows in net.updates:
                    there = [name for name in changed if name in names]
                    self._target.update(table, there, rows)

    def _remember(self, source: str, table: MirrorTable) -> None:
        self._tables[source] = table
        structure = json.dumps(table.schema.to_json())
        self._hold()
        self._record(source, target=table.target, structure=structure)
        if not self._target.has_transactional_ddl:
            self._target.commit()
            self._hold()

    def _record(self, source: str, **values: str | int) -> None:
        """Set columns of the row of a source in the table of tables."""
        sets = ", ".join(f"{name} = ?" for name in values)
        answer = self._target.ask(
            f"UPDATE {TABLES} SET {sets} WHERE consumer = ? AND source = ?",
            (*values.values(), self._name, source),
        )
        if answer.row_count:
            return
        row: dict[str, str | int | None] = {
            "consumer": self._name,
            "source": source,
            "target": "",
            "structure": None,
            "state": str(CaptureState.FOLLOWED),
            "since_scn": 0,
            "reason": "",
            **values,
        }
        marks = ", ".join("?" * len(row))
        self._target.ask(
            f"INSERT INTO {TABLES} ({', '.join(row)}) VALUES ({marks})", tuple(row.values())
        )

    def _run(self, steps: Steps[T]) -> T:
        try:
            statement = next(steps)
            while True:
                statement = steps.send(self._target.ask(*statement))
        except StopIteration as end:
            found: T = end.value
            return found

    def _guarded(self, step: Callable[[], T]) -> T:
        """Make a step; a driver's error becomes one of ours."""
        try:
            return step()
        except DatabusError:
            raise
        except Exception as error:
            if isinstance(error, self._target.row_refusals):
                raise RowRefused(f"sink {self._name}: the target refused: {error}") from error
            if isinstance(error, self._target.refusals):
                raise SinkRefused(f"sink {self._name}: the target refused: {error}") from error
            raise SinkUnavailable(f"sink {self._name}: {error!r}") from error
