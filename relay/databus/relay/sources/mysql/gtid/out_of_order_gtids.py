"""MySQL's GTIDs that have no scn: tagged ones, and out-of-order numbers.

Each tag (``uuid:tag:number``) has its own numbers.  A number comes out of order, after larger
ones, if a replica does not preserve its primary's commit order, or if a session skipped numbers
(by ``gtid_next``) that are used later.  ``binlog/groups_without_scn.py`` handles these groups.

Layout: MySQL's documentation of its serialization library, "Message format specification" and
"Variable-length integers", and of ``Gtid_event`` the order of its fields: flags, uuid, number, tag.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

_VERSION = 1
_FIELDS = 12
_FLAGS, _UUID, _NUMBER, _TAG = range(4)
_UUID_BYTES = 16
_TAG_FORM = re.compile(r"[a-z_][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True)
class TaggedGtid:
    """The server and tag of a transaction, and its number under the tag."""

    uuid: str
    tag: str
    number: int

    def __str__(self) -> str:
        return f"{self.uuid}:{self.tag}:{self.number}"


def read_tagged_gtid(body: memoryview) -> TaggedGtid:
    """Read the GTID in a GTID_TAGGED_LOG_EVENT's body.

    Raises:
        ValueError: the body has another form; IndexError: it ends too early.
    """
    version, at = read_number(body, 0)
    if version != _VERSION:
        raise ValueError(f"version {version} of its form, expected {_VERSION}")
    size, at = read_number(body, at)
    if size > len(body):
        raise ValueError(f"{len(body)} bytes, expected {size}")
    body = body[:size]
    needed, at = read_number(body, at)
    if needed > _FIELDS:
        raise ValueError(f"field {needed - 1} must be understood, {_FIELDS - 1} is the last known")
    _, at = read_number(body, _field(body, at, _FLAGS))
    at = _field(body, at, _UUID)
    octets = []
    for _ in range(_UUID_BYTES):
        octet, at = read_number(body, at)
        octets.append(octet)
    signed, at = read_number(body, _field(body, at, _NUMBER))
    number = signed >> 1
    if signed & 1 or not number:
        raise ValueError("a number that is not above 0")
    length, at = read_number(body, _field(body, at, _TAG))
    tag = bytes(body[at : at + length]).decode("ascii")
    if len(tag) != length or _TAG_FORM.fullmatch(tag) is None:
        raise ValueError(f"the tag {tag!r}, of {length} bytes")
    return TaggedGtid(str(uuid.UUID(bytes=bytes(octets))), tag, number)


def _field(body: memoryview, at: int, expected: int) -> int:
    found, at = read_number(body, at)
    if found != expected:
        raise ValueError(f"field {found}, expected {expected}")
    return at


def read_number(body: memoryview, at: int) -> tuple[int, int]:
    """An unsigned number of variable length, and where it ends.

    The count of trailing one bits in its first byte is the number of bytes that follow; the rest
    of the first byte are the number's lowest bits.

    Raises:
        IndexError: the bytes end before the number does.
    """
    first = body[at]
    more = (~first & (first + 1)).bit_length() - 1
    stop = at + 1 + more
    if stop > len(body):
        raise IndexError(f"a number ends at byte {stop} of {len(body)}")
    return int.from_bytes(body[at:stop], "little") >> min(more + 1, 8), stop
