"""A reader's request for ``/stream``, parsed from its query and headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from databus.common.access.grants import EVERYTHING, Access
from databus.common.checkpoint import After, AtTime, StartPoint
from databus.common.errors import BadRequest, Forbidden
from databus.common.filters.predicate import MAX_TEXT_CHARS, Predicate, parse_where
from databus.common.filters.stream_filter import StreamFilter
from databus.common.http.request_parameters import (
    CHECKPOINT,
    CLIENT_HEADER,
    FOLLOW,
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
from databus.common.http.stream_formats import choose_format, takes_spans
from databus.relay.serving import send_batching
from databus.relay.serving.content_coding import choose_coding
from databus.relay.serving.counters.client_counters import UNNAMED, parse_client

WHERE = Parameter(
    "where",
    "An SQL predicate over the row, before or after the change: comparisons, AND, OR, NOT, IN, "
    "BETWEEN, LIKE, IS NULL, arithmetic, lower, upper, length.",
    {"type": "string", "maxLength": MAX_TEXT_CHARS},
    "total > 100 AND state IN ('new', 'paid')",
)
COLUMNS = Parameter(
    "columns",
    "Only these columns, comma separated, and always those of the key. Frames then have rows of "
    "smaller schemas, which register lists for the same columns.",
    {"type": "string"},
    "state,total",
)
BATCH_MS = Parameter(
    "batch_ms",
    "With follow or wait_ms: collect events for this time before they are sent.",
    {"type": "integer", "minimum": 0, "default": 0},
)
BATCH_BYTES = Parameter(
    "batch_bytes",
    "With batch_ms: send at the latest when this many bytes of the stream, unfiltered, wait.",
    {"type": "integer", "minimum": 1, "default": send_batching.BATCH_BYTES},
)
CLIENT = Parameter(
    "client",
    f"Name of the client in metrics and status, without other effect; the header {CLIENT_HEADER} "
    "does the same.",
    {"type": "string", "maxLength": 64},
    "search-index",
)
FORMAT = Parameter(
    "format",
    "Form of the answer; it has priority over Accept. debezium is NDJSON whose changes are records "
    "of Debezium.",
    {"type": "string", "enum": ["frames", "ndjson", "sse", "debezium"]},
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
    BATCH_MS,
    BATCH_BYTES,
    FORMAT,
    CLIENT,
)


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A reader's request."""

    start: StartPoint | AtTime
    filter: StreamFilter
    format: str
    max_bytes: int | None
    wait_s: float
    follow: bool
    where: Predicate | None = None
    columns: frozenset[str] | None = None
    """The columns that the reader has named."""
    shown_columns: frozenset[str] | None = None
    """The columns that it gets: those that it has named, or those that are granted."""
    coding: str | None = None
    spans: bool = False
    client: str = UNNAMED
    batch_s: float = 0.0
    batch_bytes: int = send_batching.BATCH_BYTES

    @property
    def names_schemas(self) -> bool:
        """Whether it can be refused because of a table or a column that does not exist."""
        return (
            not self.filter.takes_every_source
            or bool(self.filter.sources)
            or self.where is not None
            or self.shown_columns is not None
        )


def parse_stream_request(
    query: Mapping[str, str],
    headers: Mapping[str, str],
    database: str,
    access: Access = EVERYTHING,
) -> StreamRequest:
    """The request in a query whose names are known, narrowed to what the reader may get.

    A browser that reconnects repeats its query; its position is in Last-Event-ID.

    Raises:
        BadRequest, BadFilter, BadCheckpoint, NotAcceptable.
        Forbidden: it names a source that is not granted, or a format with columns that are not.
    """
    form = query.get("format")
    if form != "debezium":
        form = choose_format(headers.get("Accept", "*/*"), form)
    elif "columns" in query:
        raise BadRequest("format=debezium has whole rows; leave out `columns`", parameter="columns")
    elif access.columns is not None:
        raise Forbidden("format=debezium has whole rows, and only some columns are granted")
    start = parse_start(query, database)
    last_id = headers.get("Last-Event-ID", "")
    if form == "sse" and last_id:
        start = After(parse_position(last_id))
    max_bytes = parse_count(query, "max_bytes", 0, least=1)
    return StreamRequest(
        start=start,
        filter=access.narrow(parse_filter(query)),
        format=form,
        max_bytes=max_bytes or None,
        wait_s=parse_count(query, "wait_ms", 0) / 1000,
        follow=parse_flag(query, "follow", form == "sse"),
        where=parse_where(query["where"]) if "where" in query else None,
        columns=(columns := parse_columns(query)),
        shown_columns=access.columns if columns is None else columns,
        coding=choose_coding(headers.get("Accept-Encoding", "")),
        spans=form == "frames" and takes_spans(headers.get("Accept", "")),
        batch_s=parse_count(query, "batch_ms", 0) / 1000,
        batch_bytes=parse_count(query, "batch_bytes", send_batching.BATCH_BYTES, least=1),
        client=parse_client(query.get("client", headers.get(CLIENT_HEADER))),
    )


def parse_columns(query: Mapping[str, str]) -> frozenset[str] | None:
    """The names in ``columns``; none of them leaves the key alone, no parameter all columns."""
    if "columns" not in query:
        return None
    return frozenset(part.strip() for part in query["columns"].split(",") if part.strip())
