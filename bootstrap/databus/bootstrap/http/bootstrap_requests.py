"""Parses the queries of readers into request values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from databus.bootstrap.reading.range_stream import RangeContent
from databus.common.checkpoint import ORIGIN, AtTime, BootstrapCheckpoint, Position
from databus.common.errors import BadRequest
from databus.common.filters.stream_filter import StreamFilter
from databus.common.http.request_parameters import (
    CHECKPOINT,
    SCN,
    START_TIME,
    parse_checkpoint,
    parse_count,
    parse_filter,
    parse_position,
    parse_time,
)
from databus.common.http.stream_formats import choose_format

MOST_SPLITS = 100_000
_WILD = frozenset(",*?[")
_RELAYS_FILTERS: Mapping[str, str] = {
    "where": "a merged run has the last change of a row alone, which need not be the one by which "
    "the row left the condition",
    "columns": "runs hold whole frames, as they came",
}
_POSITION = re.compile(r"\d+(:.*)?", re.ASCII)


def refuse_relays_filters(query: Mapping[str, str]) -> None:
    """Refuse the filters that only relays have, before they are reported as unknown.

    Raises:
            BadRequest: the message names the server that has the filter, and why this one has not.
    """
    for name, reason in _RELAYS_FILTERS.items():
        if name in query:
            raise BadRequest(
                f"a bootstrap server has no {name}=, a relay's /stream has it: {reason}; leave it "
                "out here and choose on your side",
                parameter=name,
            )


@dataclass(frozen=True, slots=True)
class BootstrapRequest:
    """A request for the state after ``since``, resumed at ``resume`` if given."""

    since: Position | AtTime
    clock: str | None
    resume: BootstrapCheckpoint | None
    filter: StreamFilter
    format: str
    max_bytes: int | None


def parse_bootstrap_request(
    query: Mapping[str, str], headers: Mapping[str, str], database: str
) -> BootstrapRequest:
    """The request in a query whose names are known; without a start point it begins with nothing.

    Raises:
        BadRequest, BadFilter, BadCheckpoint, NotAcceptable.
    """
    given = [one.name for one in (CHECKPOINT, SCN, START_TIME) if one.name in query]
    if len(given) > 1:
        raise BadRequest(f"give one of {' and '.join(given)}, not both", parameter=given[1])
    checkpoint = parse_checkpoint(query, database)
    resume = checkpoint if isinstance(checkpoint, BootstrapCheckpoint) else None
    since: Position | AtTime
    if resume is not None:
        since = resume.since
    elif checkpoint is not None:
        since = checkpoint.position
    elif "start_time" in query:
        since = AtTime(parse_time(query["start_time"]))
    else:
        since = parse_position(query["scn"]) if "scn" in query else ORIGIN
    return BootstrapRequest(
        since=since,
        clock=checkpoint.clock if checkpoint else None,
        resume=resume,
        filter=parse_filter(query),
        format=choose_format(headers.get("Accept", "*/*"), query.get("format")),
        max_bytes=parse_count(query, "max_bytes", 0, least=1) or None,
    )


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """A request for (``since``, ``until``].

    Without ``since`` it begins with the oldest retained change, without ``until`` it ends at the
    log's end.
    """

    content: RangeContent
    since: Position | AtTime | None
    until: Position | AtTime | None
    filter: StreamFilter
    format: str


def parse_changes_request(query: Mapping[str, str], headers: Mapping[str, str]) -> RangeRequest:
    """The request for changes; ``mode`` is ``net`` by default.

    Raises:
        BadRequest, BadFilter, NotAcceptable.
    """
    mode = query.get("mode", RangeContent.NET)
    if mode not in (RangeContent.ALL, RangeContent.NET):
        raise BadRequest(f"mode={mode!r} is neither net nor all", parameter="mode")
    return RangeRequest(
        content=RangeContent(mode),
        since=_point(query, "since"),
        until=_point(query, "until"),
        filter=_range_filter(query),
        format=choose_format(headers.get("Accept", "*/*"), query.get("format")),
    )


def parse_snapshot_request(query: Mapping[str, str], headers: Mapping[str, str]) -> RangeRequest:
    """The request for the state at ``scn``.

    Raises:
        BadRequest, BadFilter, NotAcceptable.
    """
    return RangeRequest(
        content=RangeContent.STATE,
        since=None,
        until=_point(query, "scn"),
        filter=_range_filter(query),
        format=choose_format(headers.get("Accept", "*/*"), query.get("format")),
    )


@dataclass(frozen=True, slots=True)
class SplitsRequest:
    """A request for the splits of a range, ``least`` of them or more."""

    range: RangeRequest
    least: int


def parse_splits_request(query: Mapping[str, str]) -> SplitsRequest:
    """The request for splits: of net changes with ``since`` or ``until``, otherwise of a state.

    Raises:
        BadRequest, BadFilter.
    """
    ranged = [name for name in ("since", "until") if name in query]
    if ranged and "scn" in query:
        raise BadRequest(f"give scn or {' and '.join(ranged)}, not both", parameter="scn")
    return SplitsRequest(
        RangeRequest(
            content=RangeContent.NET if ranged else RangeContent.STATE,
            since=_point(query, "since"),
            until=_point(query, "until" if ranged else "scn"),
            filter=_range_filter(query),
            format="frames",
        ),
        min(parse_count(query, "least", 1, least=1), MOST_SPLITS),
    )


def _range_filter(query: Mapping[str, str]) -> StreamFilter:
    """The filter, in which ``source``, one name, may replace ``sources``."""
    name = query.get("source")
    if name is None:
        return parse_filter(query)
    if "sources" in query:
        raise BadRequest("give one of source and sources, not both", parameter="source")
    if not name.strip() or _WILD & set(name):
        raise BadRequest(
            f"source={name!r} is not one name; sources= takes several, and globs",
            parameter="source",
        )
    return parse_filter({**query, "sources": name})


def _point(query: Mapping[str, str], name: str) -> Position | AtTime | None:
    """A position, or a time in ISO 8601: plain numbers are SCNs here."""
    text = query.get(name)
    if text is None:
        return None
    try:
        if _POSITION.fullmatch(text) and not re.match(r"\d{4}-", text):
            return parse_position(text)
        return AtTime(parse_time(text))
    except BadRequest as error:
        message = error.message.replace(", or microseconds since 1970", "")
        raise BadRequest(
            f"{name}: {message}" + (", or SCN, SCN:SEQ" if "no time" in message else ""),
            parameter=name,
        ) from None
