"""What the hot log stores under its keys, and how damage is detected: LMDB has no checksums.

A fact follows the CRC of its name and text, a schema follows its fingerprint, and frames have
CRCs of their own.  Values of earlier releases have neither and are read as they are.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c

from databus.bootstrap.log.log_blocks import position_at, tail_after
from databus.common.checkpoint import Position
from databus.common.errors import FormatError
from databus.common.frame import frame_format
from databus.common.schema.source_schema import SourceSchema

_KEY = struct.Struct(">QI")
_NUMBER = struct.Struct(">Q")
_SEALED = b"\xff"
"""Before a value that has a CRC or a fingerprint: no text and no position begins with it."""


def damage(folder: Path, what: str) -> FormatError:
    """The error for a damaged log."""
    return FormatError(
        f"{folder / 'data.mdb'} is damaged: {what}; restore it from a copy, or move its folder "
        f"away and let the relay dump the tables again"
    )


@contextlib.contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Add the file's name to the error about a value."""
    try:
        yield
    except FormatError as error:
        raise damage(folder, error.message) from error


class ParsedNotes:
    """JSON documents by name; each is parsed again only when its text has changed.

    Owner: any thread.
    """

    def __init__(self) -> None:
        self._parsed: dict[str, tuple[bytes, Any]] = {}

    def parse(self, name: str, text: bytes) -> Any:
        """The document in ``text``, which the caller must not change.

        Raises:
            ValueError: it is not JSON.
        """
        known = self._parsed.get(name)
        if known is None or known[0] != text:
            self._parsed[name] = known = (text, json.loads(text))
        return known[1]


def pack_position(position: Position) -> bytes:
    """A position as a key: keys ascend as positions do."""
    return _KEY.pack(position.scn, position.seq)


def unpack_position(key: bytes) -> Position:
    """The position in a key.

    Raises:
        FormatError: it is no such key.
    """
    try:
        return Position(*_KEY.unpack(key))
    except struct.error as error:
        raise FormatError(f"{key.hex()} is no position: {error}") from error


def seal_fact(name: bytes, text: bytes) -> bytes:
    """The value of a fact."""
    return b"%b%08x%b" % (_SEALED, google_crc32c.value(name + text), text)


def is_sealed(value: bytes | None) -> bool:
    """Whether a value has a CRC or a fingerprint."""
    return value is not None and value[:1] == _SEALED


def open_fact(name: bytes, value: bytes, *, must_be_sealed: bool) -> bytes:
    """The text of a fact.

    Raises:
        FormatError: it is not what was written, or it was written under another name.
    """
    if not is_sealed(value):
        if must_be_sealed:
            raise FormatError(f"the fact {name.decode(errors='replace')!r} has no CRC")
        return value
    text = value[9:]
    if value[1:9] != b"%08x" % google_crc32c.value(name + text):
        raise FormatError(f"the fact {name.decode(errors='replace')!r} has another CRC")
    return text


def schema_key(number: int) -> bytes:
    """The key of a version."""
    return _NUMBER.pack(number)


def pack_schema(number: int, schema: SourceSchema) -> tuple[bytes, bytes]:
    """(key, value) of a version."""
    text = json.dumps(schema.to_json()).encode()
    return _NUMBER.pack(number), b"%b%016x%b" % (_SEALED, schema.fingerprint, text)


def unpack_schema(number: int, key: bytes, value: bytes) -> SourceSchema:
    """The version of this number that is stored under a key.

    Raises:
        FormatError: it is not what was written.
    """
    has_check = is_sealed(value)
    try:
        if key != _NUMBER.pack(number):
            raise FormatError(f"its key is {key.hex()}")
        schema = SourceSchema.from_json(json.loads(value[17:] if has_check else value))
    except (FormatError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"schema {number}: {error}") from error
    if has_check and value[1:17] != b"%016x" % schema.fingerprint:
        raise FormatError(f"schema {number}: its fingerprint is {schema.fingerprint:016x}")
    return schema


def block_bounds(data: bytes, *, verify: bool) -> tuple[Position, Position]:
    """First and last position in a block of whole frames.

    Raises:
        FormatError: the bytes are something else; with ``verify``, also if a frame is damaged.
    """
    columns = frame_format.scan(data, verify=verify)
    if columns.stop != len(data) or not len(columns):
        raise FormatError(f"whole frames end at {columns.stop} of {len(data)} bytes")
    return position_at(columns, 0), position_at(columns, len(columns) - 1)


def drop_frames(cursor: Any, upto: Position) -> int:
    """Delete the frames up to a position, the end of a window; the bytes that were deleted.

    That window may end inside a value: the run of another server's log can have other bounds.
    """
    dropped = 0
    found = cursor.first()
    while found and unpack_position(bytes(cursor.key())) <= upto:
        dropped += len(cursor.value())
        cursor.delete()
        found = len(cursor.key()) > 0
    if found and len(rest := tail_after(bytes(cursor.value()), upto)) < len(cursor.value()):
        dropped += len(cursor.value()) - len(rest)
        cursor.put(bytes(cursor.key()), rest)
    return dropped
