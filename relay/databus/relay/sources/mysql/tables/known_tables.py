"""The tables of a stream: the catalogue, its certain parts, and the table maps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from databus.common.errors import UnsupportedChange
from databus.common.schema.source_names import join_source
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.rows.charsets import Charsets
from databus.relay.sources.mysql.statements import (
    Knowledge,
    Statement,
    StatementDialect,
    names_in,
)
from databus.relay.sources.mysql.statements.token_reader import TableName, keywords
from databus.relay.sources.mysql.tables.cascades import Cascades, ForeignKey, decode_cascades
from databus.relay.sources.mysql.tables.dropped_columns import DroppedColumns
from databus.relay.sources.mysql.tables.inferred_columns import InferredColumns, LookaheadResult
from databus.relay.sources.mysql.tables.mapped_table import (
    CatalogueDiffers,
    MappedTable,
    resolve,
    resolve_nameless,
)
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue, MySqlTable
from databus.relay.sources.mysql.tables.passed_keys import passed_by

_OBJECTS = keywords(
    """
    trigger view function procedure package event references union database schema
    """
)
"""Words of statements that may change views, triggers or foreign keys."""
_MOVES = [keywords(words) for words in ("rename", "drop", "create replace")]
"""Words of statements that take a table away, and its triggers with it."""


_SEQUENCE_COLUMNS = (
    "next_not_cached_value",
    "minimum_value",
    "maximum_value",
    "start_value",
    "increment",
    "cache_size",
    "cycle_option",
    "cycle_count",
)


class KnownTables:
    """The tables of one stream, by source and by the binlog's table ids.

    Invariants:
        I1. ``maps`` has for a table id the resolved form of its last table map, None if its rows
            are not read.
        I2. While ``inferred.is_needed``, the catalogue is used only for tables that ``lookahead``
            proves unchanged.

    ``invisible`` are captured names that tables with rows took and that are not in the catalogue:
    the account may not read them, or they were dropped.

    ``on_map`` is called at every change of ``maps``, ``on_new_file`` when it is emptied.

    Owner: the stream's decoder.
    """

    def __init__(
        self,
        settings: MySqlSettings,
        charsets: Charsets,
        catalogue: Catalogue,
        textual: frozenset[int],
    ) -> None:
        """``textual``: see ``events.read_table_map``."""
        self._settings = settings
        self._charsets = charsets
        self._textual = textual
        self.years_have_signs: bool | None = True
        self.lookahead = LookaheadResult(catalogue, ())
        self.inferred = InferredColumns()
        self.dropped = DroppedColumns()
        self.invisible: set[str] = set()
        self.maps: dict[int, MappedTable | None] = {}
        self._bodies: dict[int, bytes] = {}
        self.cascades = Cascades()
        self.on_map: Callable[[int, bytes, MappedTable | None, bool], None] = lambda *_: None
        self.on_new_file: Callable[[], None] = lambda: None

    @property
    def catalogue(self) -> Catalogue:
        """The captured tables of the catalogue that was read last."""
        return self.lookahead.catalogue

    # -- the binlog's table ids

    def begin_file(self, body: memoryview) -> None:
        """Read a FORMAT_DESCRIPTION: table ids restart; it has the server's version."""
        self.years_have_signs = binlog_events.counts_years(binlog_events.read_server_version(body))
        self.forget_maps()

    def has(self, table_id: int, body: memoryview) -> bool:
        """Whether this table map is in ``maps``."""
        return table_id in self.maps and self._bodies[table_id] == body

    def name_of(self, table_id: int) -> TableName | None:
        """The table of an id; None if no map of it has been put."""
        body = self._bodies.get(table_id)
        return binlog_events.table_map_names(memoryview(body))[1:] if body is not None else None

    @property
    def read_sources(self) -> set[str]:
        """The tables whose rows are read now."""
        return {mapped.schema.source for mapped in self.maps.values() if mapped is not None}

    def leaves_out(self, table_id: int) -> bool:
        """Whether the rows of this id are known not to be read."""
        return table_id in self.maps and self.maps[table_id] is None

    def resolve(self, body: memoryview, *, fresh: bool) -> MappedTable:
        """The table of a table map; ``fresh`` if ``lookahead`` was made for its position.

        Raises:
            CatalogueDiffers: a fresh DDL look-ahead is needed.
            TableUncertain: the definition of its rows is not certain.
            UnsupportedChange: a type cannot be converted.
        """
        found = binlog_events.read_table_map(body, self._textual, self.years_have_signs)
        whole, settings = bytes(body), self._settings
        table = self.catalogue.get(join_source(found.schema, found.table))
        if table is not None and table.unlogged:
            raise UnsupportedChange(table.unlogged)
        if found.names:
            return resolve(
                found,
                whole,
                self.catalogue,
                self._charsets,
                settings.zero_dates,
                final=fresh,
                keys=settings.keys,
            )
        source = join_source(found.schema, found.table)
        if self.inferred.get(source) is None and not fresh:
            self.inferred.is_needed = True
            raise CatalogueDiffers(source)
        known = self.inferred.get(source) or self.inferred.learn(source, self.lookahead)
        return resolve_nameless(
            found, whole, known, self._charsets, settings.zero_dates, settings.keys
        )

    def is_sequence(self, body: memoryview) -> bool:
        """Whether a table map is that of a MariaDB SEQUENCE, which has no rows of applications."""
        return binlog_events.read_table_map(body, self._textual).names == _SEQUENCE_COLUMNS

    def put(self, table_id: int, body: bytes, mapped: MappedTable | None) -> None:
        """Set the table of this id from here on."""
        self.maps[table_id] = mapped
        self._bodies[table_id] = body
        self.on_map(table_id, body, mapped, bool(self.cascades_of(table_id)))

    def cascades_of(self, table_id: int) -> Sequence[ForeignKey]:
        """The foreign keys with actions that refer to the table of this id."""
        if not self.cascades.keys:
            return ()
        return self.cascades.of(
            binlog_events.table_map_names(memoryview(self._bodies[table_id]))[1:]
        )

    def resume_cascades(self, stored: str, found: Cascades) -> None:
        """Use the foreign keys of an earlier stream, and those of the catalogue."""
        self.cascades = Cascades(decode_cascades(stored).keys | found.keys)

    def know_cascades(self, found: Cascades, *, is_present: bool) -> None:
        """Use the foreign keys of the catalogue.

        Unless it is of the stream's position, the known ones are retained: statements after the
        position may have dropped a key that still applies, or renamed a parent.
        """
        self._use_cascades(found if is_present else Cascades(found.keys | self.cascades.keys))

    def pass_keys(self, statement: Statement, dialect: StatementDialect) -> None:
        """Change the foreign keys as a statement of the stream does."""
        self._use_cascades(passed_by(self.cascades, statement, dialect))

    def _use_cascades(self, found: Cascades) -> None:
        if found.keys != self.cascades.keys:
            self.cascades = found
            self.forget_maps()

    def pass_over(self, source: str) -> None:
        """Stop reading the rows of a table."""
        for table_id, mapped in self.maps.items():
            if mapped is not None and mapped.schema.source == source:
                self.maps[table_id] = None
                self.on_map(table_id, mapped.body, None, bool(self.cascades_of(table_id)))

    def forget_maps(self) -> None:
        """Forget all table maps, so that each is resolved again."""
        self.maps.clear()
        self._bodies.clear()
        self.on_new_file()

    # -- definitions at the stream's position

    def passed(self, statement: Statement) -> None:
        """Note a statement, which may make definitions uncertain."""
        if not self.inferred.is_needed or statement.changes_nothing:
            return
        if self.inferred.forget(statement):
            self.forget_maps()

    def knowledge(self) -> Knowledge:
        """The views, triggers and routines that are known at the stream's position."""
        known = self.lookahead.knowledge
        moved: set[str] = set()
        for statement in self.lookahead.ahead:
            names = names_in(statement)
            if _OBJECTS & names:
                return replace(known, unseen=f"{statement} came before the catalogue was read")
            if any(words <= names for words in _MOVES):
                moved |= names
        return replace(known, moved=frozenset(moved)) if moved else known

    def left_by(self, statement: Statement) -> Iterator[SourceSchema]:
        """The certain definitions right after a statement, without effects of later statements.

        All tables that it has changed are included, except those without a key or with a type
        that cannot be converted: the first row of such a table suspends it.
        """
        tables: Iterable[MySqlTable]
        if self.inferred.is_needed:
            self.inferred.learn_named(statement, self.lookahead)
            tables = self.inferred.tables.values()
        else:
            lookahead = self.lookahead
            for body in lookahead.shown.values():
                with contextlib.suppress(UnsupportedChange):
                    yield self.resolve(memoryview(body), fresh=True).schema
            tables = [
                table
                for source, table in lookahead.catalogue.items()
                if statement.may_change(table.schema, table.name)
                and not (source in lookahead.shown or lookahead.changes(source))
            ]
        for table in tables:
            if table.key:
                with contextlib.suppress(UnsupportedChange):
                    yield table.source_schema(self._settings.zero_dates)
