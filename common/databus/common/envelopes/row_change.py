"""What goes into an envelope, and what comes out of it.

A ``RowChange`` is a decoded event; an ``EnvelopeRecord`` is a key and a value with their types,
which an encoding turns into bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from databus.common.envelopes.connect_types import ConnectType
from databus.common.schema.source_schema import SourceSchema


@dataclass(slots=True)
class RowChange:
    """One decoded event.

    ``key`` is None for a truncate, ``before`` and ``after`` are whole rows or None, and
    ``absent`` names the columns that the source left out of ``after``.  ``txid`` is None if the
    end of the window is not known yet.  ``source_order`` is the event's number, from 1 on, among
    those of its table in the window.
    """

    schema: SourceSchema
    op: str
    scn: int
    seq: int
    commit_us: int
    key: Mapping[str, Any] | None
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    absent: tuple[str, ...] = ()
    txid: str | None = None
    source_order: int = 1


@dataclass(slots=True)
class EndedWindow:
    """A transaction of the source whose events are all known: how many of each table, in order."""

    scn: int
    commit_us: int
    txid: str | None
    event_counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class EnvelopeRecord:
    """A record with typed key and value; a tombstone has no value type."""

    topic: str
    key_type: ConnectType | None
    key: Any
    value_type: ConnectType | None
    value: Any
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RecordTypes:
    """The types of the records of one version of a table, and their topic."""

    topic: str
    key: ConnectType
    value: ConnectType


class Envelope(Protocol):
    """Turns events into records.

    Where it ``takes_columns``, the values of a change may be columns of many changes that have one
    version, op and parts; the values of its records are then columns too.
    """

    @property
    def takes_columns(self) -> bool:
        """Whether ``records`` takes columns."""

    def records(self, change: RowChange) -> list[EnvelopeRecord]:
        """The records of one event, in order."""

    def begin(self, window: EndedWindow) -> list[EnvelopeRecord]:
        """The records before the first event of a window."""

    def end(self, window: EndedWindow) -> list[EnvelopeRecord]:
        """The records after the last event of a window."""


@runtime_checkable
class TypedEnvelope(Envelope, Protocol):
    """An envelope whose values have a schema."""

    def types_of(self, schema: SourceSchema) -> RecordTypes:
        """The types of the records of a version of a table."""


class Encoding(Protocol):
    """Turns typed values into bytes."""

    content_type: str

    def encode(self, subject: str, kind: ConnectType, value: Any) -> bytes:
        """The bytes of a value; ``subject`` is the name of its schema in a registry."""
