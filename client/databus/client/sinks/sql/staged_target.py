"""Targets that write rows from a table beside: PostgreSQL and DuckDB."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from databus.client.sinks.sql.net_rows import POSITION
from databus.client.sinks.sql.sql_target import MirrorTable, SqlTarget


class StagedTarget(SqlTarget):
    """Loads rows into a stage, and applies them with one statement."""

    @abstractmethod
    def stage(self, table: MirrorTable, rows: Any) -> contextlib.AbstractContextManager[str]:
        """A relation with these rows, by its name in SQL, for as long as the context is open."""

    def upsert(self, table: MirrorTable, rows: Any, *, are_new: bool = False) -> None:
        """INSERT ... ON CONFLICT; without a primary key, DELETE and INSERT."""
        names = rows.schema.names
        listed = self.names(names)
        with self.stage(table, rows) as stage:
            if table.schema.nullable_key:
                self._delete_from(table, stage)
                self.ask(
                    f"INSERT INTO {table.sql_name} ({listed}) SELECT {listed} FROM {stage} AS s "
                    f"WHERE NOT EXISTS (SELECT 1 FROM {table.sql_name} AS t "
                    f"WHERE {self._same_key(table)})"
                )
                return
            changed = [name for name in names if name not in table.key]
            sets = ", ".join(f"{self.quoted(one)} = EXCLUDED.{self.quoted(one)}" for one in changed)
            self.ask(
                f"INSERT INTO {table.sql_name} AS t ({listed}) SELECT {listed} FROM {stage} "
                f"ON CONFLICT ({self.names(table.key)}) DO UPDATE SET {sets} "
                f"WHERE {self._is_older_than('EXCLUDED')}"
            )

    def update(self, table: MirrorTable, names: Sequence[str], rows: Any) -> None:
        """UPDATE ... FROM the stage."""
        sets = ", ".join(
            f"{self.quoted(one)} = s.{self.quoted(one)}" for one in (*names, *POSITION)
        )
        chosen = rows.select([*table.key, *names, *POSITION])
        with self.stage(table, chosen) as stage:
            self.ask(
                f"UPDATE {table.sql_name} AS t SET {sets} FROM {stage} AS s "
                f"WHERE {self._same_key(table)} AND {self._is_older_than('s')}"
            )

    def delete(self, table: MirrorTable, rows: Any) -> None:
        """DELETE ... USING the stage."""
        with self.stage(table, rows) as stage:
            self._delete_from(table, stage)

    def _delete_from(self, table: MirrorTable, stage: str) -> None:
        self.ask(
            f"DELETE FROM {table.sql_name} AS t USING {stage} AS s "
            f"WHERE {self._same_key(table)} AND {self._is_older_than('s')}"
        )

    def _same_key(self, table: MirrorTable) -> str:
        equals = self.same if table.schema.nullable_key else "="
        names = map(self.quoted, table.key)
        return " AND ".join(f"t.{name} {equals} s.{name}" for name in names)

    def _is_older_than(self, alias: str) -> str:
        mine, other = (
            ", ".join(f"{one}.{self.quoted(name)}" for name in POSITION) for one in ("t", alias)
        )
        return f"({mine}) <= ({other})"
