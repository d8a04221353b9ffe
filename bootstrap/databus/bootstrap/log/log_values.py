"""What the hot log stores under its keys, and how damage in it shows: LMDB has no checksums.

A fact stands behind the CRC of its name and text, a schema behind its fingerprint, and frames have
their own.  Values of earlier releases have neither and are read as they are.
"""

from __future__ import annotations

import json
import struct

import google_crc32c

from databus.bootstrap.log.log_blocks import position_at
from databus.common.checkpoint import Position
from databus.common.errors import FormatError
from databus.common.frame import frame_format
from databus.common.schema.source_schema import SourceSchema

_KEY = struct.Struct(">QI")
_NUMBER = struct.Struct(">Q")
_SEALED = b"\xff"
"""Before a value that has a CRC or a fingerprint: no text and no position begins so."""


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


def open_fact(name: bytes, value: bytes) -> bytes:
    """The text of a fact.

    Raises:
        FormatError: it is another one than was written.
    """
    if value[:1] != _SEALED:
        return value
    text = value[9:]
    if value[1:9] != b"%08x" % google_crc32c.value(name + text):
        raise FormatError(f"the fact {name.decode(errors='replace')!r} has another CRC")
    return text


def pack_schema(number: int, schema: SourceSchema) -> tuple[bytes, bytes]:
    """(key, value) of a version."""
    text = json.dumps(schema.to_json()).encode()
    return _NUMBER.pack(number), b"%b%016x%b" % (_SEALED, schema.fingerprint, text)


def unpack_schema(number: int, key: bytes, value: bytes) -> SourceSchema:
    """The version that is stored under a key as the one of this number.

    Raises:
        FormatError: it is another one than was written.
    """
    is_sealed = value[:1] == _SEALED
    try:
        if key != _NUMBER.pack(number):
            raise FormatError(f"its key is {key.hex()}")
        schema = SourceSchema.from_json(json.loads(value[17:] if is_sealed else value))
    except (FormatError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"schema {number}: {error}") from error
    if is_sealed and value[1:17] != b"%016x" % schema.fingerprint:
        raise FormatError(f"schema {number}: its fingerprint is {schema.fingerprint:016x}")
    return schema


def block_bounds(data: bytes, *, verify: bool) -> tuple[Position, Position]:
    """First and last position in a block of whole frames.

    Raises:
        FormatError: it is something else; with ``verify``, or a frame is damaged.
    """
    columns = frame_format.scan(data, verify=verify)
    if columns.stop != len(data) or not len(columns):
        raise FormatError(f"whole frames end at {columns.stop} of {len(data)} bytes")
    return position_at(columns, 0), position_at(columns, len(columns) - 1)
