"""What a reader asks ``/stream`` for, out of its query and headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from databus.common.checkpoint import After, AtTime, StartPoint
from databus.common.errors import BadRequest
from databus.common.filters import StreamFilter
from databus.common.formats import choose_format, takes_spans
from databus.common.query import (
    CHECKPOINT,
    FOLLOW,
    FORMAT,
    MAX_BYTES,
    OPS,
    PARTITION,
    SCN,
    SOURCES,
    START,
    START_TIME,
    WAIT_MS,
    Parameter,
    parse_count,
    parse_filter,
    parse_flag,
    parse_position,
    parse_start,
)
from databus.relay.content_coding import choose_coding
from databus.relay.predicate import MAX_TEXT_CHARS, Predicate, parse_where

WHERE = Parameter(
    "where",
    "An SQL predicate over the row, before or after the change: comparisons, AND, OR, NOT, IN, "
    "BETWEEN, LIKE, IS NULL, arithmetic, lower, upper, length.",
    {"type": "string", "maxLength": MAX_TEXT_CHARS},
    "total > 100 AND state IN ('new', 'paid')",
)
COLUMNS = Parameter(
    "columns",
    "Names of the columns to show in NDJSON and SSE, comma separated; the key's always are.",
    {"type": "string"},
    "state,total",
)
STREAM_PARAMETERS = (
    SOURCES,
    CHECKPOINT,
    SCN,
    START,
    START_TIME,
    PARTITION,
    OPS,
    WHERE,
    COLUMNS,
    MAX_BYTES,
    WAIT_MS,
    FOLLOW,
    FORMAT,
)


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What a reader asks for."""

    start: StartPoint | AtTime
    filter: StreamFilter
    format: str
    max_bytes: int | None
    wait_s: float
    follow: bool
    where: Predicate | None = None
    columns: frozenset[str] | None = None
    coding: str | None = None
    spans: bool = False


def parse_stream_request(
    query: Mapping[str, str], headers: Mapping[str, str], database: str
) -> StreamRequest:
    """The request in a query whose names are known.

    A browser that connects again repeats its query; where it had come is in Last-Event-ID.

    Raises:
        BadRequest, BadFilter, BadCheckpoint, NotAcceptable.
    """
    form = choose_format(headers.get("Accept", "*/*"), query.get("format"))
    start = parse_start(query, database)
    last_id = headers.get("Last-Event-ID", "")
    if form == "sse" and last_id:
        start = After(parse_position(last_id))
    max_bytes = parse_count(query, "max_bytes", 0, least=1)
    return StreamRequest(
        start=start,
        filter=parse_filter(query),
        format=form,
        max_bytes=max_bytes or None,
        wait_s=parse_count(query, "wait_ms", 0) / 1000,
        follow=parse_flag(query, "follow", form == "sse"),
        where=parse_where(query["where"]) if "where" in query else None,
        columns=_parse_columns(query["columns"], form) if "columns" in query else None,
        coding=choose_coding(headers.get("Accept-Encoding", "")),
        spans=form == "frames" and takes_spans(headers.get("Accept", "")),
    )


def _parse_columns(text: str, form: str) -> frozenset[str]:
    """The names in ``columns``; none of them leaves the key alone.

    Raises:
        BadRequest: frames are sent as they were written, whole.
    """
    if form == "frames":
        raise BadRequest(
            "columns is for NDJSON and SSE; frames hold whole rows, as they were written",
            parameter="columns",
        )
    return frozenset(part.strip() for part in text.split(",") if part.strip())
