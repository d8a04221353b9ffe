"""The search sink: a document for each row, in an index for each target."""

from __future__ import annotations

from typing import Any

from databus.client.sinks.row_changes import RowChanges
from databus.client.sinks.search.bulk_requests import SearchDocument, checked_index, document_id
from databus.client.sinks.search.search_client import SearchClient
from databus.client.sinks.sink import Sink, SinkContext
from databus.client.sinks.sink_batch import SinkBatch, SinkRow
from databus.common.checkpoint import Checkpoint
from databus.common.errors import RowRefused
from databus.common.schema.column_values import to_json_record
from databus.common.sink_config import SearchSinkConfig


class SearchSink(Sink):
    """Writes the last state of each row of a batch, with the SCN as the document's version.

    Delivery: at-least-once, by key: a repetition changes nothing in the end.  After each commit of
    an online checkpoint, an index has the rows that its sources had at the checkpoint's position.

    Invariants:
        I1. A document is never replaced by one of a lower version.
        I2. A truncate deletes the documents whose versions are not above its SCN, each with that
            version, so that older rows that come again do not restore them.

    Owner: one event loop.
    Durability: the server's, when ``write`` returns.
    Raises: SinkUnavailable, SinkRefused, RowRefused.
    """

    def __init__(self, config: SearchSinkConfig) -> None:
        self._config = config
        self._client = SearchClient(config)
        self._changes = RowChanges()
        self._pending: dict[tuple[str, str], SearchDocument] = {}
        self._written: set[str] = set()

    async def open(self, context: SinkContext) -> None:
        """Connect."""
        self._pending.clear()
        await self._client.open()

    async def write(self, batch: SinkBatch) -> None:
        """Write the last state of each key."""
        self._pending.clear()
        for row in batch.rows():
            index = checked_index(row.target)
            self._written.add(index)
            if row.op == "t":
                await self._flush()
                await self._empty(index, row.position.scn)
            else:
                await self._add(index, row)
        await self._flush()

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Let searches find the rows, if that is wanted; they are durable already."""
        if self._config.refresh and self._written:
            await self._client.refresh(self._written)
        self._written.clear()

    async def rollback(self) -> None:
        """Forget what was not sent."""
        self._pending.clear()

    async def close(self) -> None:
        """Close the session."""
        await self._client.close()

    async def _flush(self) -> None:
        documents, self._pending = self._pending, {}
        await self._client.write(documents.values())

    async def _add(self, index: str, row: SinkRow) -> None:
        change = self._changes.change(row)
        place = index, document_id(row.source, row.key)
        content: dict[str, Any] | None = None
        if change.after is not None:
            content = to_json_record(change.after, change.schema.columns, change.absent)
            if change.absent:
                content = await self._filled(place, row, content, change.absent)
        self._pending.pop(place, None)  # The order of the batch is that of the last changes.
        self._pending[place] = SearchDocument(*place, row.position.scn, content)

    async def _filled(
        self,
        place: tuple[str, str],
        row: SinkRow,
        content: dict[str, Any],
        absent: tuple[str, ...],
    ) -> dict[str, Any]:
        """The whole document of a row that came without some columns, which did not change."""
        before = row.before
        if before is not None and all(name in before for name in absent):
            columns = tuple(one for one in row.event.schema.columns if one.name in absent)
            return content | to_json_record(before, columns)
        pending = self._pending.get(place)
        known = pending.content if pending is not None else None
        if pending is None:
            known = (await self._client.documents(place[0], [place[1]])).get(place[1])
        if known is None:
            raise RowRefused(
                f"{row!r} came without {', '.join(absent)}, which did not change, and "
                f"{place[0]} has no document of it. Have the source send whole rows (PostgreSQL: "
                f"ALTER TABLE {row.source} REPLICA IDENTITY FULL), or start the sink from a "
                "bootstrap"
            )
        return {name: known.get(name) for name in absent} | content

    async def _empty(self, index: str, scn: int) -> None:
        async for ids in self._client.ids_up_to(index, scn):
            await self._client.write(SearchDocument(index, one, scn, None) for one in ids)
