"""The forms in which a stream of frames goes over HTTP: frames, NDJSON, server-sent events.

A ``Format`` turns blocks of whole frames into bytes of the body.  It does not depend on the
connection.  ``choose_format`` selects it for a request.
"""

from __future__ import annotations

import functools
import json
from typing import Protocol

from databus.common.checkpoint import Position
from databus.common.errors import BadRequest, DatabusError, NotAcceptable, to_problem
from databus.common.frame.frame_format import CONTROL_NAMES, Buffer, Op, pack_frame
from databus.common.http.json_rendering import Renderer
from databus.common.json_text import json_text

FRAMES_TYPE = "application/vnd.databus.frames"
NDJSON_TYPE = "application/x-ndjson"
SSE_TYPE = "text/event-stream"
CONTENT_TYPES = {"frames": FRAMES_TYPE, "ndjson": NDJSON_TYPE, "sse": SSE_TYPE}
STREAM_TYPES = tuple(CONTENT_TYPES.values())
RENDERED_BLOCK_BYTES = 64 << 10


class Format(Protocol):
    """How frames become the bytes of a body.

    ``block_bytes`` is how much to convert at once: rendering JSON blocks the event loop, so
    its blocks are small.
    """

    content_type: str
    block_bytes: int

    def render(self, block: Buffer) -> Buffer:
        """The bytes for a block of whole frames that are known to be undamaged."""


class Frames:
    """The frames as they are."""

    content_type = FRAMES_TYPE
    block_bytes = 1 << 20

    def render(self, block: Buffer) -> Buffer:
        """The block itself."""
        return block


class Ndjson:
    """One JSON object a line."""

    content_type = NDJSON_TYPE
    block_bytes = RENDERED_BLOCK_BYTES

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def render(self, block: Buffer) -> Buffer:
        """A line for each frame."""
        lines = [json_text(document) for _, document in self._renderer.objects(block)]
        return ("\n".join(lines) + "\n").encode() if lines else b""


class ServerSentEvents:
    """One server-sent event a frame; its id is the position, so that browsers resume."""

    content_type = SSE_TYPE
    block_bytes = RENDERED_BLOCK_BYTES

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def render(self, block: Buffer) -> Buffer:
        """An event for each frame; an error has no id, since it finishes nothing."""
        parts = []
        for frame, document in self._renderer.objects(block):
            if frame.op != Op.ERROR:
                parts.append(f"id: {frame.scn}:{frame.seq}\n")
            name = CONTROL_NAMES.get(frame.op, "change")
            parts.append(f"event: {name}\ndata: {json_text(document)}\n\n")
        return "".join(parts).encode()


def error_frame(error: DatabusError, position: Position) -> bytes:
    """The frame that ends a body after ``position`` because of ``error``."""
    return pack_frame(
        op=Op.ERROR,
        scn=position.scn,
        seq=position.seq,
        after=json.dumps(to_problem(error), separators=(",", ":")).encode(),
    )


def make_format(name: str, renderer: Renderer) -> Format:
    """The format of a name in ``CONTENT_TYPES``."""
    if name == "frames":
        return Frames()
    return Ndjson(renderer) if name == "ndjson" else ServerSentEvents(renderer)


@functools.lru_cache(maxsize=64)
def choose_format(accept: str, wanted: str | None) -> str:
    """A name in ``CONTENT_TYPES`` for an Accept header and the ``format`` parameter.

    A client that accepts anything gets NDJSON, so that plain curl shows readable text; the
    client library names its type.

    Raises:
        BadRequest: there is no such format.
        NotAcceptable: the header accepts none of our formats.
    """
    if wanted is not None:
        if wanted not in CONTENT_TYPES:
            raise BadRequest(
                f"format={wanted!r} is not one of {', '.join(CONTENT_TYPES)}", parameter="format"
            )
        return wanted
    offers = [_media_range(part) for part in accept.split(",") if part.strip()]
    offers = [(media, quality) for media, quality in offers if quality > 0]
    if not offers:
        return "ndjson"
    for media, _ in sorted(offers, key=lambda offer: -offer[1]):
        for name, content_type in CONTENT_TYPES.items():
            if media == content_type:
                return name
        if media in ("*/*", "application/*"):
            return "ndjson"
    raise NotAcceptable(
        f"Accept: {accept} names none of {', '.join(CONTENT_TYPES.values())}",
        offered=list(CONTENT_TYPES.values()),
    )


@functools.lru_cache(maxsize=64)
def takes_spans(accept: str) -> bool:
    """Whether an Accept header states that the client reads SPAN frames."""
    for part in accept.lower().split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        if media == FRAMES_TYPE and "spans=1" in parameters:
            return True
    return False


def _media_range(part: str) -> tuple[str, float]:
    media, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return media, float(parameter[2:])
            except ValueError:
                return media, 0.0
    return media, 1.0
