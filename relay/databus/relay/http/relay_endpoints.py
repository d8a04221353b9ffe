"""The relay's endpoints as a table: routes and OpenAPI document are made of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from databus.common.access.grants import EndpointAction, Need, Scope
from databus.common.errors import (
    BadCheckpoint,
    BadFilter,
    ClockMismatch,
    DumpFailed,
    NotAcceptable,
    NotFound,
    ReaderOvertaken,
    ScnTooOld,
    ServerUnavailable,
    SourceUnavailable,
    UnknownDatabase,
    UnknownSource,
)
from databus.common.http import openapi_document
from databus.common.http.openapi_document import INTEGER, POSITION, TEXT, Endpoint, whole_object
from databus.common.http.request_parameters import SOURCES
from databus.common.http.stream_formats import STREAM_TYPES
from databus.common.table_state import CaptureState
from databus.relay.dumps.chunk_reads import CHUNK_TYPE, CONTENTS
from databus.relay.dumps.resync_requests import ACTIONS
from databus.relay.serving.stream_request import COLUMNS, STREAM_PARAMETERS

_RANGE = {
    "name": TEXT,
    "clock": TEXT,
    "prev": POSITION,
    "min": POSITION,
    "max": POSITION,
    "min_commit_us": INTEGER,
    "max_commit_us": INTEGER,
    "state": TEXT,
    "lag_us": {"type": ["integer", "null"]},
    "resolved_us": {
        "type": ["integer", "null"],
        "description": "All that was committed before this time is at or before `max`.",
    },
}
_SOURCE = {
    "name": TEXT,
    "source_id": INTEGER,
    "fingerprint": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
    "version": INTEGER,
    "state": {"type": "string", "enum": [str(state) for state in CaptureState]},
}
_CLUSTER_RELAY = {"name": TEXT, "address": TEXT, "zone": TEXT, "at_us": INTEGER}
_CLUSTER_DATABASE = {
    "name": TEXT,
    "epoch": {"type": ["integer", "null"]},
    "leader": {"type": ["string", "null"]},
    "relays": {
        "type": "array",
        "items": whole_object(
            {
                "relay": TEXT,
                "role": {"type": "string", "enum": ["leader", "follower"]},
                "scn": INTEGER,
                "seq": INTEGER,
                "state": TEXT,
                "error": {"type": ["string", "null"]},
                "lag_us": {"type": ["integer", "null"]},
            }
        ),
    },
}
_RELEASE: dict[str, Any] = {
    "type": "object",
    "required": ["scn"],
    "properties": {"scn": INTEGER, "seq": INTEGER, "follower": TEXT},
}
_DUMP = {
    "id": TEXT,
    "state": {
        "type": "string",
        "enum": ["queued", "running", "paused", "completed", "failed", "cancelled"],
    },
    "sources": {"type": "array", "items": TEXT},
    "rows": INTEGER,
    "chunks": INTEGER,
    "error": {"type": ["object", "null"]},
    "end": {"oneOf": [POSITION, {"type": "null"}]},
    "missing": {"type": "array", "items": {"type": "array"}},
    "progress": {
        "type": "object",
        "properties": {
            "tables": INTEGER,
            "tables_done": INTEGER,
            "rows_read": INTEGER,
            "estimated_rows": {"type": ["integer", "null"]},
            "rows_per_s": {"type": ["number", "null"]},
            "eta_s": {"type": ["number", "null"]},
            "waits_for": TEXT,
        },
    },
}
_PACE = {
    "chunk_rows": INTEGER,
    "chunk_ms": INTEGER,
    "delay_ms": INTEGER,
    "share": INTEGER,
    "parallel": INTEGER,
}
_READER = {"oneOf": [POSITION, {"type": "null"}]}
_DUMP_REQUEST = {
    "type": "object",
    "required": ["sources"],
    "properties": {
        "sources": {"type": "array", "items": TEXT},
        "where": TEXT,
        "keys": {"type": "array", "items": {"type": "array"}},
        "delete_missing": {"type": "boolean"},
        "after": {"type": "object", "additionalProperties": {"type": "array"}},
        "watermark_table": TEXT,
        "reader": _READER,
        **_PACE,
    },
    "additionalProperties": False,
}
_DUMP_CHANGE = {
    "type": "object",
    "properties": {
        "state": {"type": "string", "enum": ["paused", "running"]},
        "reader": _READER,
        **_PACE,
    },
    "additionalProperties": False,
}
_CHUNK_REQUEST = {
    "type": "object",
    "required": ["source"],
    "properties": {
        "source": TEXT,
        "limit": INTEGER,
        "after": {"type": ["array", "null"]},
        "upto": {"type": ["array", "null"]},
        "keys": {"type": ["array", "null"], "items": {"type": "array"}},
        "content": {"type": "string", "enum": list(CONTENTS)},
    },
    "additionalProperties": False,
}
_TABLE = {
    "source": TEXT,
    "state": {"type": "string", "enum": [str(state) for state in CaptureState]},
    "since_scn": INTEGER,
    "reason": TEXT,
    "cure": TEXT,
    "by": TEXT,
    "dump": TEXT,
    "tries": INTEGER,
    "again_us": INTEGER,
    "is_free": {"type": "boolean"},
}
_TABLE_REQUEST = {
    "type": "object",
    "required": ["action"],
    "properties": {
        "action": {"type": "string", "enum": list(ACTIONS)},
        "source": TEXT,
        "by": TEXT,
        "sources": {"type": "array", "items": TEXT},
        "reason": TEXT,
        "is_operator": {"type": "boolean"},
        "for_good": {"type": "boolean"},
    },
    "additionalProperties": False,
}
_HEADERS = {
    "Databus-Clock": "Identity of the stream's clock.",
    "Databus-Prev": "SCN:SEQ just before the oldest event; the oldest start point served.",
    "Databus-Min": "SCN:SEQ of the oldest frame.",
    "Databus-Max": "SCN:SEQ of the newest frame.",
    "Databus-Epoch": "In a cluster: the fencing number of the newest leader of whom it has frames.",
    "Content-Encoding": "zstd or gzip, if Accept-Encoding names one; each batch is flushed.",
    "Databus-Ahead": "true: the start point is ahead of the stream, and the relay waits for it.",
    "Databus-Start": "SCN:SEQ after which the answer starts; only with start_time.",
}


def _list(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    return whole_object(
        {name: {"type": "array", "items": {"type": "object", "properties": properties}}}
    )


_DATABASE = (UnknownDatabase, SourceUnavailable)
_DUMPS = (UnknownDatabase, ServerUnavailable)
_SCHEMA = {**_SOURCE, "schema": {"type": "object"}}
del _SCHEMA["name"], _SCHEMA["state"]
_SCHEMA["source"] = TEXT

_READ = Need(Scope.COLUMNS, EndpointAction.READ)
_DUMP_CONTROL = Need(Scope.DATABASE, EndpointAction.DUMP)
_by_fetcher = partial(Endpoint, handler="pass_on")

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET",
        "/v1/databases",
        "databases",
        "The databases that are served, with the range of each stream.",
        answer=_list("databases", _RANGE),
        needs=Need(Scope.DATABASES, EndpointAction.READ),
    ),
    Endpoint(
        "GET",
        "/v1/cluster",
        "cluster",
        "In a cluster: which relay leads and follows each database, and how far it is.",
        answer=whole_object(
            {
                "cluster": TEXT,
                "relays": {"type": "array", "items": whole_object(_CLUSTER_RELAY)},
                "databases": {"type": "array", "items": whole_object(_CLUSTER_DATABASE)},
            }
        ),
        errors=(NotFound,),
        needs=Need(Scope.DATABASES, EndpointAction.READ),
    ),
    Endpoint(
        "GET",
        "/v1/{db}/sources",
        "sources",
        "The sources of a database.",
        answer=whole_object(
            {**_RANGE, "sources": {"type": "array", "items": whole_object(_SOURCE)}}
        ),
        errors=_DATABASE,
        needs=_READ,
    ),
    Endpoint(
        "GET",
        "/v1/{db}/register",
        "register",
        "All schema versions of the sources.",
        parameters=(SOURCES, COLUMNS),
        answer=whole_object(
            {
                "database": TEXT,
                "clock": TEXT,
                "tables": {"type": "array", "items": {"type": "object", "properties": _TABLE}},
                "schemas": {"type": "array", "items": whole_object(_SCHEMA)},
            }
        ),
        errors=(BadFilter, *_DATABASE, UnknownSource),
        needs=_READ,
    ),
    Endpoint(
        "GET",
        "/v1/{db}/stream",
        "stream",
        "The events after a start point.",
        parameters=STREAM_PARAMETERS,
        produces=STREAM_TYPES,
        headers=_HEADERS,
        errors=(
            BadFilter,
            BadCheckpoint,
            *_DATABASE,
            UnknownSource,
            NotAcceptable,
            ClockMismatch,
            ScnTooOld,
            ReaderOvertaken,
        ),
        needs=_READ,
    ),
    _by_fetcher(
        "POST",
        "/v1/{db}/chunks",
        "chunks",
        "Present rows of a table in the source, or their digests, outside the stream.",
        body=_CHUNK_REQUEST,
        produces=(CHUNK_TYPE,),
        errors=(*_DUMPS, UnknownSource),
        needs=Need(Scope.SOURCES, EndpointAction.REPLICATE),
    ),
    _by_fetcher(
        "GET",
        "/v1/{db}/tables",
        "tables",
        "The tables that are suspended or resynchronising, with reason and cure.",
        answer=_list("tables", _TABLE),
        errors=_DUMPS,
        needs=Need(Scope.DATABASE, EndpointAction.READ),
    ),
    _by_fetcher(
        "POST",
        "/v1/{db}/tables",
        "change_table",
        "Resynchronise a suspended table, or claim it in order to compare and repair it.",
        body=_TABLE_REQUEST,
        answer={
            **_list("tables", _TABLE),
            "properties": {
                **_list("tables", _TABLE)["properties"],
                "granted": {"type": "boolean"},
                "returned": {"type": "array", "items": {"type": "string"}},
            },
        },
        errors=_DUMPS,
        needs=Need(Scope.DATABASE, EndpointAction.ADMIN),
    ),
    _by_fetcher(
        "POST",
        "/v1/{db}/release",
        "release",
        "Release the events of a ring in block mode that its reader has.",
        body=_RELEASE,
        answer=whole_object({"prev": POSITION, "max": POSITION}),
        errors=(*_DUMPS, ScnTooOld),
        needs=Need(Scope.DATABASE, EndpointAction.REPLICATE),
    ),
    _by_fetcher(
        "GET",
        "/v1/{db}/resume_state",
        "resume_state",
        "In a cluster: what a follower needs to lead, and as of which position.",
        answer=whole_object({"at": POSITION, "state": TEXT, "epoch": INTEGER, "leader": TEXT}),
        errors=_DUMPS,
        needs=Need(Scope.DATABASE, EndpointAction.REPLICATE),
    ),
    _by_fetcher(
        "POST",
        "/v1/{db}/dumps",
        "start_dump",
        "Start a dump: send the present rows of tables through the stream.",
        status=202,
        body=_DUMP_REQUEST,
        answer=whole_object(_DUMP),
        errors=(*_DUMPS, UnknownSource),
        needs=Need(Scope.SOURCES, EndpointAction.DUMP),
    ),
    _by_fetcher(
        "GET",
        "/v1/{db}/dumps",
        "dumps",
        "All recorded dumps.",
        answer=_list("dumps", _DUMP),
        errors=_DUMPS,
        needs=_DUMP_CONTROL,
    ),
    _by_fetcher(
        "GET",
        "/v1/{db}/dumps/{id}",
        "dump",
        "One dump with its progress.",
        answer=whole_object(_DUMP),
        errors=(*_DUMPS, NotFound),
        needs=_DUMP_CONTROL,
    ),
    _by_fetcher(
        "PATCH",
        "/v1/{db}/dumps/{id}",
        "change_dump",
        "Pause or resume a dump, change its pace, report the position of its reader.",
        body=_DUMP_CHANGE,
        answer=whole_object(_DUMP),
        errors=(*_DUMPS, NotFound, DumpFailed),
        needs=_DUMP_CONTROL,
    ),
    _by_fetcher(
        "DELETE",
        "/v1/{db}/dumps/{id}",
        "cancel_dump",
        "Cancel a dump.",
        answer=whole_object(_DUMP),
        errors=(*_DUMPS, NotFound),
        needs=_DUMP_CONTROL,
    ),
    *openapi_document.operations("relay", "Whether every database can be served."),
)


def document() -> dict[str, Any]:
    """The relay's OpenAPI document."""
    return openapi_document.document(
        "Databus relay",
        "Change events of databases, from a bounded buffer, by pull.",
        ENDPOINTS,
    )
