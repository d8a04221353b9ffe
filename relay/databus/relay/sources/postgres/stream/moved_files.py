"""Tables whose rows moved to another file since the last look, and whether the rows are the same.

The stream has no event for writes to a table that is UNLOGGED for a moment, or for a TRUNCATE of
a partition.  Afterwards the catalogue shows another file for the rows.  VACUUM FULL and CLUSTER
also make a new file, with the same rows; so does a TRUNCATE, which has an event.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from databus.relay.sources.postgres.stream.slot_stream import SlotStream
from databus.relay.sources.postgres.tables.postgres_catalogue import Catalogue
from databus.relay.sources.postgres.tables.postgres_tables import PostgresTable
from databus.relay.sources.postgres.tables.publications import Publication, PublishedTables
from databus.relay.sources.postgres.tables.table_definitions import Definition


class MovedFiles:
    """The tables' files, as the looks at the catalogue found them.

    Owner: the source; one look at a time.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._horizons: dict[int, int] = {}
        self._awaited: dict[str, int] = {}

    def seen(self, tables: Collection[PostgresTable], found: Mapping[int, Definition]) -> None:
        """Record the files of these tables as of this look."""
        for table in tables:
            self._awaited.pop(table.source, None)
            if table.oid in found:
                self._horizons[table.oid] = found[table.oid].horizon

    async def other_rows(
        self,
        table: PostgresTable,
        published: PublishedTables,
        publication: Publication,
        definition: Definition | None,
        stream: SlotStream | None,
    ) -> Collection[int] | None:
        """The files that may hold other rows than the events gave, by the oids of the table or its
        partitions.  None: the stream has yet to come to where it shows."""
        known = published.of(table.source)
        stored = known.definition.horizon if known and known.definition else 0
        horizon = max(stored, self._horizons.get(table.oid, 0))
        moved = {
            oid: version
            for oid, version in published.moved(table, publication, definition).items()
            if not (horizon and await self._catalogue.has_rows_before(oid, horizon))
        }
        if not moved or published.gap(table, publication, definition) is not None:
            return moved
        by = stream.truncated_by(table.oid) if stream is not None else None
        if by is not None and moved.keys() <= await self._catalogue.truncated_by(moved, by):
            return ()  # Its rows went with an event, and nothing has moved it since.
        if table.source not in self._awaited:
            self._awaited[table.source] = await self._catalogue.written_scn()
        has_come = stream is not None and stream.resolved >= self._awaited[table.source]
        return moved if has_come else None
