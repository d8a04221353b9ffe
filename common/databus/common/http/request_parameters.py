"""Request parameters of the streaming endpoints, as values: start point, filter, limits.

The relay's ``/stream`` and the bootstrap server's ``/bootstrap`` read the same names with the
same meaning.  ``Parameter`` describes one for the OpenAPI document and for errors about unknown
names.  What is not here: HTTP itself.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from databus.common.checkpoint import (
    SCN_MAX,
    SEQ_END,
    After,
    AtTime,
    Checkpoint,
    Latest,
    Oldest,
    OnlineCheckpoint,
    Position,
    StartPoint,
    decode,
)
from databus.common.errors import BadCheckpoint, BadRequest
from databus.common.filters.stream_filter import (
    StreamFilter,
    parse_ops,
    parse_partition,
    parse_sources,
)
from databus.common.spelling import spelling_advice


@dataclass(frozen=True, slots=True)
class Parameter:
    """One query parameter; ``schema`` is its JSON schema."""

    name: str
    description: str
    schema: Mapping[str, Any]
    example: str | int | None = None


SOURCES = Parameter(
    "sources", "Globs over source names, comma separated.", {"type": "string"}, "shop.*"
)
CHECKPOINT = Parameter(
    "checkpoint", "Start after this checkpoint, passed back as received.", {"type": "string"}
)
SCN = Parameter(
    "scn",
    "Start after everything at this SCN, or after SCN:SEQ.",
    {"type": "string", "pattern": r"^\d+(:(\d+|end))?$"},
    "1004",
)
START = Parameter(
    "start",
    "Start with the oldest event of the ring, or with the next new one.",
    {"type": "string", "enum": ["oldest", "latest"], "default": "oldest"},
)
START_TIME = Parameter(
    "start_time",
    "Start with the first window committed at this time or later: ISO 8601, in UTC if it has no "
    "zone, or microseconds since 1970.",
    {"type": "string"},
    "2026-03-01T12:00:00Z",
)
PARTITION = Parameter(
    "partition",
    "Only these keys: by the remainder of their hash, mod:COUNT:A,B or mod:COUNT:A-B; by the range "
    "of their hash, hash:COUNT:A-B; or by number, range:SIZE:A-B.",
    {"type": "string"},
    "mod:16:3,7",
)
OPS = Parameter("ops", "Only these operations: c, u, d, r.", {"type": "string"}, "c,u,d")
MAX_BYTES = Parameter(
    "max_bytes",
    "Largest size of the frames of the answer; the first frame is always sent.",
    {"type": "integer", "minimum": 1},
)
WAIT_MS = Parameter(
    "wait_ms",
    "If there is no event yet, wait this long for the next one.",
    {"type": "integer", "minimum": 0, "default": 0},
)
FOLLOW = Parameter(
    "follow",
    "Keep the answer open, and send events as they are committed.",
    {"type": "boolean", "default": False},
)
FORMAT = Parameter(
    "format",
    "Form of the answer; it has priority over Accept.",
    {"type": "string", "enum": ["frames", "ndjson", "sse"]},
)
CLIENT_HEADER = "Databus-Client"
"""The header with a reader's name; the server uses it for its counters alone."""
START_PARAMETERS = (CHECKPOINT, SCN, START, START_TIME)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def check_names(query: Iterable[str], known: Sequence[str]) -> None:
    """Refuse the names in a query that are not ``known``.

    Raises:
        BadRequest: the message has the nearest right name.
    """
    for name in query:
        if name not in known:
            advice = spelling_advice(name, known, "known are:")
            raise BadRequest(f"unknown parameter {name!r}; {advice}", parameter=name)


def parse_filter(query: Mapping[str, str]) -> StreamFilter:
    """The filter in ``sources``, ``ops`` and ``partition``; none of them takes everything.

    Raises:
        BadFilter: one of them is not of its form.
    """
    return StreamFilter(
        sources=parse_sources(query["sources"]) if "sources" in query else (),
        ops=parse_ops(query["ops"]) if "ops" in query else frozenset(),
        partition=parse_partition(query["partition"]) if "partition" in query else None,
    )


def parse_position(text: str) -> Position:
    """``1004`` (everything at it), ``1004:3`` or ``1004:end``.

    Raises:
        BadRequest: it has another form, or is out of range.
    """
    scn, colon, seq = text.partition(":")
    numbers = [scn] if seq == "end" or not colon else [scn, seq]
    if all(number.isascii() and number.isdigit() and len(number) <= 20 for number in numbers):
        position = Position(int(scn), int(seq) if len(numbers) == 2 else SEQ_END)
        if position.scn <= SCN_MAX and position.seq <= SEQ_END:
            return position
    raise BadRequest(f"{text!r} is not a position: write SCN, SCN:SEQ or SCN:end", parameter="scn")


def parse_checkpoint(query: Mapping[str, str], database: str) -> Checkpoint | None:
    """The checkpoint in ``checkpoint``, or None.

    Raises:
        BadCheckpoint: it is damaged, or belongs to another database.
    """
    if "checkpoint" not in query:
        return None
    checkpoint = decode(query["checkpoint"])
    if checkpoint.database != database:
        raise BadCheckpoint(
            f"the checkpoint belongs to the database {checkpoint.database!r}, not {database!r}"
        )
    return checkpoint


def parse_start(query: Mapping[str, str], database: str) -> StartPoint | AtTime:
    """The start point: one of ``START_PARAMETERS``; none means the oldest.

    Raises:
        BadRequest: two of them are given, or one is not of its form.
        BadCheckpoint: the checkpoint is damaged, of another database, or one of a bootstrap.
    """
    given = [parameter.name for parameter in START_PARAMETERS if parameter.name in query]
    if len(given) > 1:
        raise BadRequest(f"give one of {' and '.join(given)}, not both", parameter=given[1])
    checkpoint = parse_checkpoint(query, database)
    if isinstance(checkpoint, OnlineCheckpoint):
        return After(checkpoint.position, checkpoint.clock)
    if checkpoint is not None:
        raise BadCheckpoint(
            "the checkpoint is in the middle of a bootstrap; send it to a bootstrap server"
        )
    if "scn" in query:
        return After(parse_position(query["scn"]))
    if "start_time" in query:
        return AtTime(parse_time(query["start_time"]))
    start = query.get("start", "oldest")
    if start not in ("oldest", "latest"):
        raise BadRequest(f"start={start!r} is neither oldest nor latest", parameter="start")
    return Latest() if start == "latest" else Oldest()


def parse_time(text: str) -> int:
    """Microseconds since 1970 of an ISO 8601 time or of such a number.

    A time without a zone is UTC, a date alone its midnight.

    Raises:
        BadRequest: it is neither.
    """
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    try:
        time = dt.datetime.fromisoformat(text)
        time = time.replace(tzinfo=dt.UTC) if time.tzinfo is None else time.astimezone(dt.UTC)
    except (ValueError, OverflowError):
        raise BadRequest(
            f"{text!r} is not a time: write ISO 8601 such as 2026-03-01T12:00:00Z, with + as %2B, "
            "or microseconds since 1970",
            parameter="start_time",
        ) from None
    return (time - _EPOCH) // dt.timedelta(microseconds=1)


def parse_count(query: Mapping[str, str], name: str, default: int, *, least: int = 0) -> int:
    """A whole number of ``least`` or more.

    Raises:
        BadRequest: it is not one.
    """
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18) or int(text) < least:
        raise BadRequest(f"{name}={text!r} is not a whole number from {least} on", parameter=name)
    return int(text)


_TRUTHS: Mapping[str, bool] = {"true": True, "1": True, "": True, "false": False, "0": False}


def parse_flag(query: Mapping[str, str], name: str, default: bool = False) -> bool:
    """``true``, ``1`` or the bare name; ``false`` or ``0``.

    Raises:
        BadRequest: it is something else.
    """
    if name not in query:
        return default
    if query[name].lower() not in _TRUTHS:
        raise BadRequest(f"{name}={query[name]!r} is neither true nor false", parameter=name)
    return _TRUTHS[query[name].lower()]
