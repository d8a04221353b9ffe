"""Where a consumer is: positions, start points and checkpoints, with their one JSON codec.

A ``Position`` is a point in the order of one stream.  A ``Checkpoint`` is what a consumer has
durably finished: a position with the database and the clock that it belongs to, and for a
consumer in the middle of a bootstrap also its progress in that bootstrap.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from databus.common.errors import BadCheckpoint

SCN_MAX = 2**64 - 1
SEQ_END = 2**32 - 1
CHECKPOINT_VERSION = 1


class Position(NamedTuple):
    """A point in a stream: it covers everything at or before (scn, seq).

    ``seq`` is the raw index of a frame within its scn; ``SEQ_END`` means all of the scn.
    """

    scn: int
    seq: int = SEQ_END

    def __str__(self) -> str:
        return f"{self.scn}:{'end' if self.seq == SEQ_END else self.seq}"

    def to_json(self) -> dict[str, int]:
        """``{"scn", "seq"}``; seq is left out if it means all of the scn."""
        if self.seq == SEQ_END:
            return {"scn": self.scn}
        return {"scn": self.scn, "seq": self.seq}


ORIGIN = Position(0, 0)
"""Before everything: scn 0 is never given to a window."""


@dataclass(frozen=True, slots=True)
class Oldest:
    """Start with the oldest retained event."""


@dataclass(frozen=True, slots=True)
class Latest:
    """Start with the next event to come."""


@dataclass(frozen=True, slots=True)
class AtTime:
    """Start with the first window that was committed at ``commit_us`` or later.

    The server resolves the time to a position.
    """

    commit_us: int


@dataclass(frozen=True, slots=True)
class After:
    """Start with the first event after ``position``.

    ``clock`` is None for a bare SCN; otherwise the server refuses another clock.
    """

    position: Position
    clock: str | None = None


StartPoint = Oldest | Latest | After


@dataclass(frozen=True, slots=True)
class OnlineCheckpoint:
    """The consumer follows a relay and has finished everything up to ``position``."""

    database: str
    clock: str
    position: Position


@dataclass(frozen=True, slots=True)
class BootstrapCheckpoint:
    """The consumer is in the middle of a bootstrap.

    It had everything up to ``since`` before; the bootstrap goes up to ``target``, and every
    run before ``run`` and the first ``row`` rows of ``run`` are finished.  ``position`` is
    where its state is known to be consistent, so that any other bootstrap server can resume
    there if ``run`` is gone.
    """

    database: str
    clock: str
    since: Position
    target: Position
    run: str
    row: int
    position: Position


Checkpoint = OnlineCheckpoint | BootstrapCheckpoint
MERGED_CLOCK = "commit time"


@dataclass(frozen=True, slots=True)
class StreamMark:
    """Where one stream of a merge is.

    ``us``: no window of the stream that comes later has an earlier merged time.  ``checkpoint`` is
    None if the stream has not begun.
    """

    name: str
    us: int
    checkpoint: Checkpoint | None


@dataclass(frozen=True, slots=True)
class MergedCheckpoint(OnlineCheckpoint):
    """The consumer of several streams has finished everything up to a place in each of them.

    The clock of a merge is commit time: the scn of ``position`` is the merged time of the last
    window, in microseconds since 1970.
    """

    streams: tuple[StreamMark, ...] = ()


def encode(checkpoint: Checkpoint) -> str:
    """The checkpoint as one line of JSON."""
    common = {"v": CHECKPOINT_VERSION, "db": checkpoint.database, "clock": checkpoint.clock}
    if isinstance(checkpoint, MergedCheckpoint):
        streams = {
            one.name: {"us": one.us}
            | ({} if one.checkpoint is None else {"at": json.loads(encode(one.checkpoint))})
            for one in checkpoint.streams
        }
        document = {
            **common,
            "mode": "merged",
            **checkpoint.position.to_json(),
            "streams": streams,
        }
    elif isinstance(checkpoint, OnlineCheckpoint):
        document = {**common, "mode": "online", **checkpoint.position.to_json()}
    else:
        document = {
            **common,
            "mode": "bootstrap",
            "since": checkpoint.since.to_json(),
            "target": checkpoint.target.to_json(),
            "run": checkpoint.run,
            "row": checkpoint.row,
            **checkpoint.position.to_json(),
        }
    return json.dumps(document, separators=(",", ":"))


def decode(text: str | bytes) -> Checkpoint:
    """The checkpoint that ``encode`` wrote.

    Raises:
        BadCheckpoint: the text is not such a line, or a value is out of its range.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"the checkpoint is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadCheckpoint(f"the checkpoint is a {type(document).__name__}, not an object")
    if document.get("v") != CHECKPOINT_VERSION:
        raise BadCheckpoint(
            f"the checkpoint has version {document.get('v')!r}; this program reads "
            f"{CHECKPOINT_VERSION}"
        )
    database, clock = _string(document, "db"), _string(document, "clock")
    position = decode_position(document)
    mode = document.get("mode")
    if mode == "online":
        return OnlineCheckpoint(database, clock, position)
    if mode == "bootstrap":
        return BootstrapCheckpoint(
            database,
            clock,
            since=decode_position(document.get("since")),
            target=decode_position(document.get("target")),
            run=_string(document, "run"),
            row=_integer(document, "row", SCN_MAX),
            position=position,
        )
    if mode == "merged":
        streams = document.get("streams")
        if not isinstance(streams, dict) or not all(isinstance(s, dict) for s in streams.values()):
            raise BadCheckpoint(f"the checkpoint's streams are {streams!r}, not objects by name")
        marks = tuple(
            StreamMark(
                name,
                _integer(one, "us", SCN_MAX),
                decode(json.dumps(one["at"])) if "at" in one else None,
            )
            for name, one in streams.items()
        )
        return MergedCheckpoint(database, clock, position, marks)
    raise BadCheckpoint(f"the checkpoint's mode is {mode!r}, not online, bootstrap or merged")


def decode_position(document: Any) -> Position:
    """The position in ``{"scn": .., "seq": ..}``; without seq it means all of the scn."""
    if not isinstance(document, dict):
        raise BadCheckpoint(f"a position is {document!r}, not an object with scn and seq")
    scn = _integer(document, "scn", SCN_MAX)
    return Position(scn, _integer(document, "seq", SEQ_END) if "seq" in document else SEQ_END)


def _string(document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise BadCheckpoint(f"the checkpoint's {key} is {value!r}, not a string")
    return value


def _integer(document: dict[str, Any], key: str, most: int) -> int:
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise BadCheckpoint(f"the checkpoint's {key} is {value!r}, not a number from 0 to {most}")
    return value
