"""GTIDs without a place in MySQL's clock: how tagged ones are read, and what may come under one.

A tag (``uuid:tag:number``) counts numbers of its own.  A number may also come late, behind larger
ones: where a replica does not keep the order of its primary's commits, or numbers were left free
(a session named one in ``gtid_next``) and are used up later.  Of our servers neither may change
anything that is captured.  What it may do is told by its bytes alone, not by the catalogue: they
are sent again at a restart until they are purged, and what was passed over once must be passed
over then too.

Layout: MySQL's documentation of its serialization library, "Message format specification" and
"Variable-length integers", and of ``Gtid_event`` the order of its fields: flags, uuid, number, tag.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from databus.common.schema.source_names import join_source
from databus.relay.sources.mysql.protocol.binlog_events import table_map_names

_VERSION = 1
_FIELDS = 12
_FLAGS, _UUID, _NUMBER, _TAG = range(4)
_UUID_BYTES = 16
_TAG_FORM = re.compile(r"[a-z_][a-z0-9_]{0,31}")

_WITHIN = ("SAVEPOINT", "RELEASE SAVEPOINT", "ROLLBACK TO")
_OF_ACCOUNTS = re.compile(
    r"\s*(?:(?:CREATE|ALTER|DROP|RENAME)\s+(?:USER|ROLE)|GRANT|REVOKE"
    r"|SET\s+(?:PASSWORD|DEFAULT\s+ROLE))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class TaggedGtid:
    """Whose transaction it is, and its number under the tag."""

    uuid: str
    tag: str
    number: int

    def __str__(self) -> str:
        return f"{self.uuid}:{self.tag}:{self.number}"


def read_tagged_gtid(body: memoryview) -> TaggedGtid:
    """A GTID_TAGGED_LOG_EVENT's body, as far as it names the transaction.

    Raises:
        ValueError: it is not of its form; IndexError: it ends too early.
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

    The ones at the low end of its first byte tell how many bytes follow; the rest of the first
    byte are the number's lowest bits.

    Raises:
        IndexError: the bytes end before it does.
    """
    first = body[at]
    more = (~first & (first + 1)).bit_length() - 1
    stop = at + 1 + more
    if stop > len(body):
        raise IndexError(f"a number ends at byte {stop} of {len(body)}")
    return int.from_bytes(body[at:stop], "little") >> min(more + 1, 8), stop


class OutOfOrderGroup:
    """A group of a server of ours that has no place, while it is read: what of it cannot be passed
    over.  ``name`` and ``why`` tell of it to people; ``number`` is 0, ``server`` empty under a tag.

    Its methods answer what it changes that is captured, or may be, in words; "" if nothing.

    Owner: the decoder.
    """

    def __init__(
        self,
        name: str,
        why: str,
        captures: Callable[[str, str], bool],
        *,
        server: str = "",
        number: int = 0,
    ) -> None:
        self.name, self.why = name, why
        self.server, self.number = server, number
        self.ended = False
        self._captures = captures
        self._tables: dict[int, str] = {}

    def table_map(self, body: memoryview) -> None:
        """Rows of this table may follow."""
        table_id, schema, table = table_map_names(body)
        self._tables[table_id] = join_source(schema, table) if self._captures(schema, table) else ""

    def rows(self, body: memoryview) -> str:
        """Rows are changed.

        Raises:
            ValueError: their table was not told.
        """
        table_id = int.from_bytes(body[0:6], "little")
        if table_id not in self._tables:
            raise ValueError(f"rows of table {table_id} without its map")
        source = self._tables[table_id]
        return f"changes rows of {source}" if source else ""

    def statement(self, statement: str) -> str:
        """A statement.  Of accounts and roles it is certain that no table is changed by it."""
        word = statement.strip().upper()
        if word == "BEGIN" or word.startswith(_WITHIN):
            return ""
        self.ended = True
        if word in ("COMMIT", "ROLLBACK") or _OF_ACCOUNTS.match(statement):
            return ""
        return f"brings the statement {statement[:80]!r}, which may change what is captured"
