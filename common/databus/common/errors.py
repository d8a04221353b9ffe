"""Every error that Databus raises, as one tree.

Each class has three attributes besides its message: ``code``, the stable name on the wire and in
logs; ``retry``, whether the same call may succeed later without any change; and ``hint``, what
the operator does.  On the wire an error is a problem document (RFC 9457), and the other side
finds the class by its ``code``.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from databus.common.private import without_passwords

MAX_PAUSE_S = 300.0


class DatabusError(Exception):
    """Root of the tree.  ``details`` are numbers and names that a program may use."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    retry: ClassVar[bool] = False
    hint: ClassVar[str] = "Check the log of the process that answered."

    def __init__(self, message: str, **details: Any) -> None:
        message = without_passwords(message)
        super().__init__(message)
        self.message = message
        self.details = details


class BadRequest(DatabusError):
    """A parameter is missing, unknown or malformed."""

    code = "bad_request"
    status = 400
    hint = "Correct the parameter that the message names; /v1/openapi.json lists them all."


class BadFilter(BadRequest):
    """A filter cannot be parsed."""

    code = "bad_filter"
    hint = (
        "Write partition=mod:COUNT:A,B, partition=hash:COUNT:A,B or partition=range:SIZE:A-B, ops "
        "out of c,u,d,r, and "
        "where as an SQL condition over the columns that /v1/{database}/register lists."
    )


class BadCheckpoint(BadRequest):
    """A checkpoint is not one of ours, or is damaged."""

    code = "bad_checkpoint"
    hint = "Pass back a checkpoint as it was received, or start with start=oldest."


class UnknownDatabase(DatabusError):
    """The server does not serve this database."""

    code = "unknown_database"
    status = 404
    hint = "GET /v1/databases lists the databases."


class UnknownSource(DatabusError):
    """No table of this name, or none that matches the pattern."""

    code = "unknown_source"
    status = 404
    hint = "GET /v1/{database}/sources lists the sources; globs such as shop.* are allowed."


class NotFound(DatabusError):
    """No such resource."""

    code = "not_found"
    status = 404
    hint = "Check the path; /v1/openapi.json lists all paths."


class MethodNotAllowed(DatabusError):
    """The resource has no such method."""

    code = "method_not_allowed"
    status = 405
    hint = "The Allow header names the methods there are; /v1/openapi.json describes them."


class NotAcceptable(DatabusError):
    """The server has none of the forms that the request accepts."""

    code = "not_acceptable"
    status = 406
    hint = "Leave Accept out, or set format=frames, ndjson or sse."


class RequestTimeout(DatabusError):
    """The request's body did not come in time."""

    code = "request_timeout"
    status = 408
    hint = "Send the whole body at once."


class UnsupportedMediaType(DatabusError):
    """The body's type is not supported."""

    code = "unsupported_media_type"
    status = 415
    hint = "Send JSON in UTF-8, with Content-Type: application/json and no Content-Encoding."


class Unauthenticated(DatabusError):
    """The request has no valid token and no valid certificate."""

    code = "unauthenticated"
    status = 401
    hint = (
        "Give the client a token (token_file, or DATABUS_TOKEN_FILE) or a certificate that the "
        "server's [auth] section has."
    )


class Forbidden(DatabusError):
    """The grants of the caller do not cover the request."""

    code = "forbidden"
    status = 403
    hint = "Request what is granted, or add a grant to the caller in the server's [auth] section."


class TooManyRequests(DatabusError):
    """The caller has reached one of its limits, or the server has as many readers as it may."""

    code = "too_many_requests"
    status = 429
    retry = True
    hint = (
        "Try again after the seconds in Retry-After; [auth] has the limits of each caller, "
        "max_readers in [bootstrap] that of readers."
    )


class ForeignHost(DatabusError):
    """The Host of a request for a change is not a name of this server."""

    code = "foreign_host"
    status = 403
    hint = 'Name the host in the configuration: allowed_hosts = ["relay.example.com"].'


class ForeignOrigin(DatabusError):
    """A page of another site requests a change."""

    code = "foreign_origin"
    status = 403
    hint = "Send the request from a program, or from a page of this server."


class ClockMismatch(DatabusError):
    """A checkpoint belongs to another clock than the stream's."""

    code = "clock_mismatch"
    status = 409
    hint = (
        "The checkpoint was made with another database than the one behind this name. "
        "Restore the right database, or delete the checkpoint and start from the bootstrap."
    )


class ScnTooOld(DatabusError):
    """The position is before the oldest one that the server has."""

    code = "scn_too_old"
    status = 410
    hint = "Catch up from a bootstrap server, or start with start=oldest and accept the gap."


class ReaderOvertaken(ScnTooOld):
    """The writer overwrote the range while it was being read."""

    code = "reader_overtaken"
    hint = "Resume at the last checkpoint. If it happens often, enlarge ring_bytes."


class LogTooYoung(DatabusError):
    """The log of the bootstrap server starts after the requested position."""

    code = "log_too_young"
    status = 410
    hint = "Empty the consumer's state and start again with start=bootstrap."


class NotSeeded(DatabusError):
    """The bootstrap server does not have the whole table yet."""

    code = "not_seeded"
    status = 503
    retry = True
    hint = "Wait until its dump has ended; /v1/status shows its progress."


class SourceUnavailable(DatabusError):
    """The source database cannot be reached, or closed the connection."""

    code = "source_unavailable"
    status = 503
    retry = True
    hint = "The relay retries with back-off. Check the database, and the rights of the user."


class SourcePositionLost(DatabusError):
    """The source no longer has the log after our position."""

    code = "source_position_lost"
    status = 503
    hint = (
        "Changes are missing. Move the folder of the ring away to start at the present, "
        "then dump the tables: databus dump."
    )


class UnsupportedChange(DatabusError):
    """The source sent a change that the stream cannot represent exactly."""

    code = "unsupported_change"
    hint = "The message names the table and the change."


class PreflightFailed(DatabusError):
    """The source is not set up for capture.  ``details['findings']`` lists what to change."""

    code = "preflight_failed"
    hint = "Run the statements that the findings give, then start again."


class MissingDependency(DatabusError):
    """An optional package is not installed."""

    code = "missing_dependency"
    hint = "Install the extra that the message names."


class ConfigError(DatabusError):
    """The configuration cannot be used."""

    code = "config_error"
    hint = "Correct the key that the message names; the manual lists every key."


class FormatError(DatabusError):
    """Bytes do not match the format.  None of them has been used."""

    code = "format_error"
    hint = "The bytes are damaged or of another version. Read them again from their origin."


class UnknownSchema(DatabusError):
    """A frame names a schema that is not registered."""

    code = "unknown_schema"
    status = 404
    retry = True
    hint = "Request GET /v1/{database}/register again; it has all versions."


class StoreError(DatabusError):
    """A file of Databus cannot be read or written."""

    code = "store_error"
    hint = "Check the disk's free space and the folder's owner."


class SyncFailed(StoreError):
    """The disk failed to write a file; its content on disk is unknown."""

    code = "sync_failed"
    hint = (
        "Check the disk (dmesg, SMART, the events of the volume). The process restarts, and reads "
        "again from the source what was not on disk; nothing of it was acknowledged."
    )


class BucketError(StoreError):
    """S3 refuses to read or write an object, or does not answer."""

    code = "bucket_error"
    retry = True
    hint = (
        "The message contains the answer of S3. Check the bucket, the rights of the credentials, "
        "the network, and [bootstrap.s3] or [export.s3]."
    )


class StoreBusy(StoreError):
    """Another process has the store open for writing."""

    code = "store_busy"
    retry = True
    hint = "Stop the process that the message names, or use another data_dir."


class CheckpointMoved(StoreError):
    """The stored checkpoint is not the one from which this process continued."""

    code = "checkpoint_moved"
    hint = (
        "Start the client again: it continues at the stored checkpoint. If another process runs "
        "under the same consumer name, stop one of the two, or give it a name of its own."
    )


class LeaseExpired(DatabusError):
    """A lease of a reader has ended: the files that it retained may be gone."""

    code = "lease_expired"
    status = 410
    hint = "Request the splits again: GET /v1/{db}/splits."


class FrameTooLarge(DatabusError):
    """One row does not fit into the ring."""

    code = "frame_too_large"
    hint = "Enlarge ring_bytes of this database."


class RingFull(DatabusError):
    """A ring in block mode has no room until its readers advance."""

    code = "ring_full"
    retry = True
    hint = "Wait for the reader, or enlarge ring_bytes."


class ServerUnavailable(DatabusError):
    """A relay or bootstrap server does not answer, or is starting."""

    code = "server_unavailable"
    status = 503
    retry = True
    hint = "The client retries with back-off, on one server after the other."


class LeadershipLost(DatabusError):
    """The lease of a cluster's leader has ended: another relay leads, or may soon."""

    code = "leadership_lost"
    status = 503
    retry = True
    hint = "The relay follows the new leader. If it happens often, check the way to ZooKeeper."


class ConsumerFailed(DatabusError):
    """A callback failed, and so did all its retries."""

    code = "consumer_failed"
    hint = "Fix the consumer (the cause is chained), and start it again from its checkpoint."


class SinkUnavailable(DatabusError):
    """The target of a sink does not answer, or refuses a connection."""

    code = "sink_unavailable"
    retry = True
    hint = "Start the target, or correct its address. The sink retries and loses nothing."


class SinkRefused(DatabusError):
    """The target of a sink refuses rows or a definition, and a retry cannot help."""

    code = "sink_refused"
    hint = "Change the target or the configuration as the message says, then start the sink again."


class RowRefused(SinkRefused):
    """The target of a sink refuses the values of a row, and may take others."""

    code = "row_refused"
    hint = (
        "Change the target or the row, then start the sink again; or set refused = 'set-aside' in "
        "[sink], so that the sink stores such rows as dead letters and continues."
    )


class DumpFailed(DatabusError):
    """A dump failed before its end; it can be resumed."""

    code = "dump_failed"
    hint = "Remove the cause that the message names, then resume: databus dump --resume ID."


class WindowMissing(DatabusError):
    """A window of the stream is missing: the end of the next one refers to it."""

    code = "window_missing"
    status = 500
    retry = True
    hint = (
        "The reader retries from its last good position, at another server if there is one. "
        "If the error repeats, check the ring of the relay: databus inspect ring FOLDER."
    )


class UsageError(DatabusError):
    """The application calls the library in a way that cannot work."""

    code = "usage_error"
    hint = "Change the calling code as the message describes."


class InternalError(DatabusError):
    """A fault of the program."""

    code = "internal_error"


def _subclasses(cls: type[DatabusError]) -> list[type[DatabusError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _subclasses(child))]


def registry() -> dict[str, type[DatabusError]]:
    """All classes by their wire code."""
    return {cls.code: cls for cls in _subclasses(DatabusError)}


def to_problem(error: DatabusError) -> dict[str, Any]:
    """The error as a problem document: type, title, status, detail, code, retry, hint."""
    return {
        "type": f"urn:databus:error:{error.code}",
        "title": error.code.replace("_", " "),
        "status": error.status,
        "detail": error.message,
        "code": error.code,
        "retry": error.retry,
        "hint": error.hint,
        **error.details,
    }


_PROBLEM_KEYS = frozenset({"type", "title", "status", "detail", "code", "retry", "hint"})


def from_problem(problem: dict[str, Any]) -> DatabusError:
    """The error in a problem document; an unknown code gives the root class."""
    cls = registry().get(str(problem.get("code")), DatabusError)
    error = cls(str(problem.get("detail", problem.get("title", "no detail given"))))
    # Set here and not passed: a key may have the name of a parameter.
    error.details = {key: value for key, value in problem.items() if key not in _PROBLEM_KEYS}
    return error


def requested_pause_s(error: DatabusError) -> float:
    """How long a server wants its caller to pause, ``MAX_PAUSE_S`` at most; 0 without a wish."""
    asked_s = error.details.get("retry_after_s") if isinstance(error, TooManyRequests) else None
    if not isinstance(asked_s, int | float) or not asked_s > 0:
        return 0.0
    return min(float(asked_s), MAX_PAUSE_S)


def from_error_frame(body: bytes) -> DatabusError:
    """The error that an ERROR frame holds."""
    problem = _document(body)
    if problem is None:
        return FormatError(f"an error frame without a problem document: {body[:200]!r}")
    return from_problem(problem)


def _document(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def from_answer(
    url: str, status: int, body: bytes, otherwise: type[DatabusError] | None = None
) -> DatabusError:
    """The error for an HTTP answer: that of its problem document, or else by its status.

    A status of 429 gives TooManyRequests, 3xx or 5xx ServerUnavailable, any other one ``otherwise``
    or BadRequest.
    A document whose ``code`` is unknown may come from a proxy: then the status counts.
    """
    problem = _document(body)
    if problem is not None and str(problem.get("code")) in registry():
        return from_problem(problem)
    if 300 <= status < 400:
        return ServerUnavailable(
            f"{url} answered {status}, a redirect, which is not followed; give the server's own URL"
        )
    message = f"{url} answered {status}: {body[:200].decode(errors='replace')}"
    if status == 429:
        return TooManyRequests(message)
    if status >= 500:
        return ServerUnavailable(message)
    return (otherwise or BadRequest)(message)
