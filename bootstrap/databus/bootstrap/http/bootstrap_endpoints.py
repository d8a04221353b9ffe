"""The bootstrap server's endpoints as a table: routes and OpenAPI document are made of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from databus.common.access.grants import EndpointAction, Need, Scope
from databus.common.errors import (
    BadCheckpoint,
    BadFilter,
    BucketError,
    ClockMismatch,
    LeaseExpired,
    LogTooYoung,
    NotAcceptable,
    NotSeeded,
    ServerUnavailable,
    StoreError,
    UnknownDatabase,
    UnknownSource,
)
from databus.common.http import openapi_document
from databus.common.http.openapi_document import POSITION, TEXT, Endpoint, whole_object
from databus.common.http.request_parameters import (
    CHECKPOINT,
    FORMAT,
    MAX_BYTES,
    OPS,
    PARTITION,
    SCN,
    SOURCES,
    START_TIME,
    Parameter,
)
from databus.common.http.stream_formats import STREAM_TYPES

SINCE = Parameter(
    "since",
    "Changes after this point: SCN (everything at it), SCN:SEQ, or a commit time in ISO 8601; "
    "without it from the oldest retained change.",
    {"type": "string"},
    "1004",
)
UNTIL = Parameter(
    "until",
    "Changes up to this point, in the same forms; without it up to the end of the log.",
    {"type": "string"},
    "2026-03-01T12:00:00Z",
)
MODE = Parameter(
    "mode",
    "net: the last state of each key that changed; all: every change.",
    {"type": "string", "enum": ["net", "all"], "default": "net"},
)
AS_OF = Parameter(
    "scn",
    "The state as of this SCN, SCN:SEQ or commit time; without it at the end of the log. A "
    "point in the middle of a transaction means the state before it.",
    {"type": "string"},
    "1004",
)
ONE_SOURCE = Parameter(
    "source", "One source by its name, instead of sources.", {"type": "string"}, "shop.orders"
)
LEAST_SPLITS = Parameter(
    "least",
    "At least so many splits, where the files have enough row groups.",
    {"type": "integer", "minimum": 1, "default": 1},
    "16",
)
LEASE = Parameter(
    "lease",
    "Renew this lease, and nothing else.",
    {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "0f3c5a7e9b1d2f4a6c8e0b2d4f6a8c0e",
)
CHANGES_PARAMETERS = (SINCE, UNTIL, MODE, SOURCES, ONE_SOURCE, OPS, PARTITION, FORMAT)
SNAPSHOT_PARAMETERS = (AS_OF, SOURCES, ONE_SOURCE, OPS, PARTITION, FORMAT)
SPLITS_PARAMETERS = (AS_OF, SINCE, UNTIL, SOURCES, ONE_SOURCE, LEAST_SPLITS, LEASE)
BOOTSTRAP_PARAMETERS = (SOURCES, CHECKPOINT, SCN, START_TIME, PARTITION, OPS, MAX_BYTES, FORMAT)
SCN_PARAMETERS = (SOURCES, CHECKPOINT)

_OBJECTS = {"type": "array", "items": {"type": "object"}}
_RANGE = {
    "name": TEXT,
    "clock": TEXT,
    "prev": POSITION,
    "max": POSITION,
    "snapshot": {"oneOf": [POSITION, {"type": "null"}]},
    "state": {"type": "string", "enum": ["seeding", "seeded", "failing"]},
}
_FAILURE = {
    "error": {**TEXT, "description": "Why the state is failing; the database is not served then."},
}
_RANGE_HEADERS = {
    "Databus-Clock": "Identity of the stream's clock.",
    "Databus-Max": "SCN:SEQ of the target.",
    "Databus-Start": "SCN:SEQ after which the answer starts.",
}
_DATABASE = (UnknownDatabase, ServerUnavailable)
_RANGE_ERRORS = (
    BadFilter,
    *_DATABASE,
    UnknownSource,
    NotAcceptable,
    LogTooYoung,
    NotSeeded,
    StoreError,
    BucketError,
)
_SCN_ERRORS = (BadFilter, BadCheckpoint, *_DATABASE, UnknownSource, ClockMismatch)

_READ = Need(Scope.SOURCES, EndpointAction.READ)
_stream = partial(Endpoint, "GET", produces=STREAM_TYPES, headers=_RANGE_HEADERS, needs=_READ)

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET",
        "/v1/databases",
        "databases",
        "The stored databases, with the range of each log and the position of the snapshot.",
        answer=whole_object(
            {"databases": {"type": "array", "items": whole_object(_RANGE, _FAILURE)}}
        ),
        needs=Need(Scope.DATABASES, EndpointAction.READ),
    ),
    Endpoint(
        "GET",
        "/v1/{db}/sources",
        "sources",
        "The sources of a database, and the progress of their first dump.",
        answer=whole_object({**_RANGE, "sources": _OBJECTS}, _FAILURE),
        errors=_DATABASE,
        needs=_READ,
    ),
    Endpoint(
        "GET",
        "/v1/{db}/register",
        "register",
        "All schema versions of the sources.",
        parameters=(SOURCES,),
        answer=whole_object({"database": TEXT, "clock": TEXT, "schemas": _OBJECTS}),
        errors=(BadFilter, *_DATABASE, UnknownSource),
        needs=_READ,
    ),
    Endpoint(
        "GET",
        "/v1/{db}/startSCN",
        "start_scn",
        "The position of the snapshot; scn 0 while it does not have all rows of the sources.",
        parameters=SCN_PARAMETERS,
        answer=POSITION,
        errors=_SCN_ERRORS,
        needs=_READ,
    ),
    Endpoint(
        "GET",
        "/v1/{db}/targetSCN",
        "target_scn",
        "The end of a bootstrap that starts now.",
        parameters=SCN_PARAMETERS,
        answer=POSITION,
        errors=_SCN_ERRORS,
        needs=_READ,
    ),
    _stream(
        "/v1/{db}/bootstrap",
        "bootstrap",
        "The state of the sources, or the changes since a start point, up to the target.",
        parameters=BOOTSTRAP_PARAMETERS,
        errors=(BadCheckpoint, ClockMismatch, *_RANGE_ERRORS),
    ),
    _stream(
        "/v1/{db}/changes",
        "changes",
        "The changes between two positions or commit times, then a checkpoint at the second.",
        parameters=CHANGES_PARAMETERS,
        errors=_RANGE_ERRORS,
    ),
    _stream(
        "/v1/{db}/snapshot",
        "snapshot",
        "The state of all sources as of one position, then a checkpoint at it.",
        parameters=SNAPSHOT_PARAMETERS,
        errors=_RANGE_ERRORS,
    ),
    Endpoint(
        "GET",
        "/v1/{db}/splits",
        "splits",
        "The files of a state, or of the net changes between two points, for readers that open "
        "them themselves, under a lease that the reader renews.",
        parameters=SPLITS_PARAMETERS,
        answer=whole_object(
            {"lease": TEXT, "lease_s": {"type": "number"}},
            {
                "clock": TEXT,
                "since": {"oneOf": [POSITION, {"type": "null"}]},
                "until": POSITION,
                "files_end": POSITION,
                "storage": {"type": "object"},
                "splits": _OBJECTS,
            },
        ),
        errors=(
            BadFilter,
            *_DATABASE,
            UnknownSource,
            LogTooYoung,
            NotSeeded,
            StoreError,
            BucketError,
            LeaseExpired,
        ),
        needs=_READ,
    ),
    *openapi_document.operations("store", "Whether every database has a log."),
)


def document() -> dict[str, Any]:
    """The bootstrap server's OpenAPI document."""
    return openapi_document.document(
        "Databus bootstrap server",
        "The state of databases, and the changes since any position, by pull.",
        ENDPOINTS,
    )
