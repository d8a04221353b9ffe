"""The states of a captured table: followed, suspended, resynchronising.

The content of a TABLE_STATE frame, and of every document that shows tables.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

from databus.common.errors import FormatError


class CaptureState(enum.StrEnum):
    """Whether the stream gives a table's content."""

    FOLLOWED = "followed"
    """Applying the stream gives the table's content at the end of every window."""
    SUSPENDED = "suspended"
    """The stream does not have the table's changes, or not all of them."""
    RESYNCHRONISING = "resynchronising"
    """The table's content is being compared and repaired, or dumped again."""


@dataclass(frozen=True, slots=True)
class TableState:
    """The state of one table.

    ``since_scn`` is the transaction since which the stream does not give its content, ``reason``
    what happened there, ``cure`` what the operator can do.  A followed table has none of them.
    """

    source: str
    state: CaptureState
    since_scn: int = 0
    reason: str = ""
    cure: str = ""

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the frame, and of documents that show it."""
        return {
            "source": self.source,
            "state": str(self.state),
            "since_scn": self.since_scn,
            "reason": self.reason,
            "cure": self.cure,
        }

    def encode(self) -> bytes:
        """The content of a TABLE_STATE frame."""
        return json.dumps(self.to_json()).encode()


def decode_table_state(content: bytes) -> TableState:
    """The state in the content of a TABLE_STATE frame.

    Raises:
        FormatError: it is not a table's state.
    """
    try:
        document = json.loads(content)
    except ValueError as error:
        raise FormatError(f"{content[:200]!r} is not a table's state: {error}") from error
    return table_state_of(document)


def table_state_of(document: Any) -> TableState:
    """The state in a JSON object; keys that are unknown are ignored.

    Raises:
        FormatError: it is not a table's state.
    """
    try:
        return TableState(
            str(document["source"]),
            CaptureState(document["state"]),
            int(document["since_scn"]),
            str(document["reason"]),
            str(document["cure"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{str(document)[:200]!r} is not a table's state: {error}") from error
