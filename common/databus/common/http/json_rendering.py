"""Frames as JSON: what NDJSON, server-sent events and the command line show.

One object an event, ``{"database","source","op","scn","seq","ts_us","txid","key","before",
"after"}`` in this order, and control objects ``{"control": ...}``.  ``txid`` comes from the
window's end, so it is null if that is in another block than the event.  Columns that a
partial frame does not hold are left out of ``after``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from databus.common.frame.frame_format import (
    CONTROL_NAMES,
    OP_LETTERS,
    Buffer,
    FrameView,
    Op,
    with_txids,
)
from databus.common.schema.column_values import to_json_record
from databus.common.schema.source_schema import Column, SourceSchema


class Renderer:
    """Turns the frames of one database into JSON objects.

    ``schema_of`` gives the schema of a fingerprint or raises UnknownSchema.  ``wanted`` are the
    names of the columns to show besides those of the key; None shows all.

    Owner: one task.
    Raises: UnknownSchema and FormatError; the block that raised has not been rendered.
    """

    def __init__(
        self,
        database: str,
        schema_of: Callable[[int], SourceSchema],
        wanted: frozenset[str] | None = None,
    ) -> None:
        self.database = database
        self._schema_of = schema_of
        self._wanted = wanted
        self._shown: dict[int, tuple[Column, ...]] = {}

    def objects(
        self, block: Buffer, *, verify: bool = False
    ) -> Iterator[tuple[FrameView, dict[str, Any]]]:
        """Each frame of a block of whole frames with its object.

        Pass ``verify`` for bytes that are not checked yet.
        """
        for frame, txid in with_txids(block, verify=verify):
            yield frame, self.control(frame) if frame.is_control else self.event(frame, txid)

    def event(self, frame: FrameView, txid: str | None) -> dict[str, Any]:
        """The object of a row change."""
        schema = self._schema_of(frame.schema_fp)
        before, after = frame.before, frame.after
        absent = schema.absent_names(frame.absent) if frame.absent_len else ()
        columns = schema.columns if self._wanted is None else self._projected(schema)
        return {
            "database": self.database,
            "source": schema.source,
            "op": OP_LETTERS[frame.op],
            "scn": frame.scn,
            "seq": frame.seq,
            "ts_us": frame.commit_us,
            "txid": txid or None,
            "key": to_json_record(schema.decode_key(frame.key), schema.key_columns)
            if frame.key_len
            else None,
            "before": None
            if before is None
            else to_json_record(schema.decode_row(before), columns),
            "after": None
            if after is None
            else to_json_record(schema.decode_row(after), columns, absent),
        }

    def _projected(self, schema: SourceSchema) -> tuple[Column, ...]:
        """The columns to show, in the table's order."""
        shown = self._shown.get(schema.fingerprint)
        if shown is None:
            names = (self._wanted or frozenset()) | set(schema.key)
            shown = tuple(column for column in schema.columns if column.name in names)
            self._shown[schema.fingerprint] = shown
        return shown

    def control(self, frame: FrameView) -> dict[str, Any]:
        """The object of a control frame."""
        name = CONTROL_NAMES[frame.op]
        position = {"scn": frame.scn, "seq": frame.seq, "ts_us": frame.commit_us}
        if frame.op == Op.END_OF_WINDOW:
            return {
                "control": name,
                "scn": frame.scn,
                "seq": frame.seq,
                "events": frame.event_count,
                "ts_us": frame.commit_us,
                **_window_before(frame),
            }
        if frame.op in (Op.HEARTBEAT, Op.SPAN):
            return {"control": name, **position}
        content = json.loads(bytes(frame.after or b"null"))
        if frame.op == Op.ERROR:
            return {"control": name, **content}
        if frame.op == Op.CHECKPOINT:
            return {"control": name, "checkpoint": content}
        if frame.op == Op.TABLE_STATE:
            return {"control": name, **content, **position}
        return {"control": name, "source": content["source"], **position, "schema": content}


def _window_before(frame: FrameView) -> dict[str, Any]:
    """Where the window before a window ended, if its end states that."""
    scn, seq = frame.key_hash, frame.schema_fp
    return {"prev": {"scn": scn, "seq": seq}} if scn or seq else {}
