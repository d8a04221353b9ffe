"""The tables of a database that are not followed: their records, and the file.

resync.py changes their states.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from databus.common.errors import FormatError
from databus.common.table_state import CaptureState, TableState
from databus.relay.ring.data_folder import read_document, write_document

_STORED_ROWS_REMAIN = "keeps_rows"
"""The name of ``rows_remain`` on disk."""


@dataclasses.dataclass(slots=True)
class TableRecord:
    """A table that is not followed, or that is followed and whose readers have no notice of it yet.

    ``by`` resynchronises it: the relay with the dump ``dump``, or a bootstrap server that has
    claimed it until ``until_us``.  After ``tries`` failures it is retried at ``again_us``.
    ``is_confirmed``: an operator requested the resynchronisation.  ``is_declined``: a bootstrap
    server cannot repair it, so that the relay has to dump it.  ``published`` is the state in the
    last frame about it, ``cure`` that of a chained relay's parent.  ``rows_remain``: the copies
    of its readers have all rows and only old values, so nothing is emptied.
    ``waits_for``: what must be done before it can be resynchronised; empty: nothing is known.
    ``is_gone``: there is no such table any more, and the record ends once readers have emptied it.
    ``returned``: the columns that the stream dropped from it and has again.
    """

    source: str
    state: CaptureState
    since_scn: int
    reason: str
    error: str = ""
    by: str = ""
    dump: str = ""
    until_us: int = 0
    tries: int = 0
    again_us: int = 0
    noticed_us: int = 0
    is_confirmed: bool = False
    is_declined: bool = False
    cure: str = ""
    published: str = ""
    rows_remain: bool = False
    waits_for: str = ""
    is_gone: bool = False
    returned: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_restored_by_truncate(self) -> bool:
        """Whether the table is whole from a TRUNCATE event on.

        Not with ``rows_remain``: the definition that changed can be later than the event.
        """
        return self.state == CaptureState.SUSPENDED and not (self.dump or self.rows_remain)

    def to_json(self) -> dict[str, Any]:
        """The record as it is on disk."""
        stored = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        stored[_STORED_ROWS_REMAIN] = stored.pop("rows_remain")
        return stored

    @classmethod
    def of_json(cls, stored: dict[str, Any]) -> TableRecord:
        """The record that ``to_json`` has encoded.

        Raises:
            ValueError, TypeError: it is something else.
        """
        rows_remain = stored.pop(_STORED_ROWS_REMAIN, False)
        return cls(**{**stored, "state": CaptureState(stored["state"]), "rows_remain": rows_remain})

    def suspend(self, error: str, again_us: int) -> None:
        """An attempt to resynchronise it has failed, or was given up."""
        self.state, self.error, self.again_us = CaptureState.SUSPENDED, error, again_us
        self.by = self.dump = ""
        self.until_us = 0


class TableBook:
    """All records of a database.

    Invariants:
        I1. The file is never ahead of the ring's disk: ``write`` gets a result of ``content`` from
            before the ring was synced.  Only the record of ``write_before_sync`` may be ahead.

    Owner: the fetcher's loop; only ``write`` may be called in another thread, and ``content`` not
        before it has ended.
    Durability: when ``write`` returns, the records are on disk.
    Raises: StoreError, FormatError from the constructor if the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, TableRecord] = {}
        self._before_sync: dict[str, dict[str, Any]] = {}
        self._write_lock = threading.Lock()
        content = read_document(path)
        if content is None:
            return
        try:
            for document in json.loads(content)["tables"]:
                record = TableRecord.of_json(document)
                self._records[record.source] = record
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path} is damaged: {error!r}; move it away") from error

    def __iter__(self) -> Iterator[TableRecord]:
        return iter(list(self._records.values()))

    def __bool__(self) -> bool:
        return bool(self._records)

    def get(self, source: str) -> TableRecord | None:
        """The record of a table; None: it is followed."""
        return self._records.get(source)

    def add(self, record: TableRecord) -> None:
        """Add a table that is not followed any more."""
        self._records[record.source] = record

    def remove(self, source: str) -> None:
        """Remove a table that is followed again."""
        self._records.pop(source, None)

    def content(self) -> bytes:
        """The file's content now."""
        self._before_sync.clear()
        return json.dumps({"v": 1, "tables": [record.to_json() for record in self]}).encode()

    def write(self, content: bytes) -> None:
        """Write a result of ``content`` to disk."""
        with self._write_lock:
            if self._before_sync:
                document = json.loads(content)
                tables = {
                    table["source"]: table for table in document["tables"]
                } | self._before_sync
                content = json.dumps({**document, "tables": list(tables.values())}).encode()
            write_document(self.path, content)

    def write_before_sync(self, content: bytes, record: TableRecord) -> None:
        """Write a record to disk before the ring's next sync; the file had ``content`` before."""
        self._before_sync[record.source] = record.to_json()
        self.write(content)


def shown(record: TableRecord, database: str, *, is_automatic: bool) -> TableState:
    """A record's state as readers see it."""
    if record.state == CaptureState.FOLLOWED:
        return TableState(record.source, record.state)
    reason = record.reason
    if record.error:
        reason += f"; the last attempt to resynchronise it failed: {record.error}"
    return TableState(
        record.source, record.state, record.since_scn, reason,
        _cure(record, database, is_automatic=is_automatic),
    )  # fmt: skip


def _cure(record: TableRecord, database: str, *, is_automatic: bool) -> str:
    if record.cure:
        return record.cure
    if record.state == CaptureState.RESYNCHRONISING:
        return "Wait until it is followed."
    command = f"databus resync RELAY_URL/{database} {record.source}"
    if record.waits_for:
        after = "it is resynchronised automatically, or at once with" if is_automatic else "run"
        return f"{record.waits_for}; then {after}: {command}"
    if not is_automatic and not record.is_confirmed:
        return f"Remove the cause, then run: {command}"
    if record.tries:
        return (
            f"Remove the cause: {record.tries} attempts to resynchronise it have failed. The next "
            f"starts automatically, or at once with: {command}"
        )
    return "The table is resynchronised automatically."
