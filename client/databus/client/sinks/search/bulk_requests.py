"""The requests of ``_bulk``: a document for each row, with the SCN as its external version.  Pure.

The server writes a document only if its version is not lower than that which is there, so that an
older row never replaces a newer one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from databus.client.sinks.redis.redis_rows import text_of
from databus.common.errors import RowRefused, SinkRefused, SinkUnavailable

VERSION = {"version_type": "external_gte"}
_LONGEST_ID_BYTES = 512
_ILLEGAL = re.compile(r'[\\/*?"<>| ,#:]|^[-_+.]')


@dataclass(frozen=True, slots=True)
class SearchDocument:
    """The last state of one row; ``content`` is None for a row that was deleted."""

    index: str
    id: str
    version: int
    content: Mapping[str, Any] | None

    def lines(self) -> bytes:
        """Its lines in the body of ``_bulk``."""
        action = {"_index": self.index, "_id": self.id, "version": self.version, **VERSION}
        if self.content is None:
            return _line({"delete": action})
        return _line({"index": action}) + _line(self.content)


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def checked_index(target: str) -> str:
    """The index of a target: in lower case.

    Raises:
        SinkRefused: an index cannot have this name.
    """
    name = target.lower()
    if not name or _ILLEGAL.search(name) or len(name.encode()) > 255:
        raise SinkRefused(
            f"the target {target!r} is no name of an index: give the route a `target` of "
            "lower-case letters, digits, '-', '_' and '.'"
        )
    return name


def document_id(source: str, key: Mapping[str, Any]) -> str:
    """The id of a row: its key as text, of several columns as a JSON array of texts.

    Raises:
        RowRefused: it is longer than ids may be.
    """
    texts = [None if one is None else _text(one) for one in key.values()]
    first = texts[0] if texts else None
    found = first if len(texts) == 1 and first is not None else json.dumps(texts)
    if not 0 < len(found.encode()) <= _LONGEST_ID_BYTES:
        raise RowRefused(
            f"{source}: a key of {len(found.encode())} bytes is no id of a document, which has 1 "
            f"to {_LONGEST_ID_BYTES} bytes"
        )
    return found


def _text(value: Any) -> str:
    found = text_of(value)
    return found if isinstance(found, str) else found.hex()


def bodies(documents: Iterable[SearchDocument], most_bytes: int) -> Iterator[tuple[bytes, int]]:
    """The documents as bodies of at most about so many bytes, with the number in each."""
    lines: list[bytes] = []
    size = 0
    for one in documents:
        more = one.lines()
        if lines and size + len(more) > most_bytes:
            yield b"".join(lines), len(lines)
            lines, size = [], 0
        lines.append(more)
        size += len(more)
    if lines:
        yield b"".join(lines), len(lines)


def check_answer(answer: Mapping[str, Any], count: int) -> None:
    """Check that each item of a ``_bulk`` was written, or is there in a newer version.

    Raises:
        SinkUnavailable: a retry may help.
        RowRefused: the server does not take a document.
    """
    items = answer.get("items")
    if not isinstance(items, list) or len(items) != count:
        raise SinkUnavailable(f"the answer of _bulk has not {count} items: {str(answer)[:200]}")
    refusal: RowRefused | None = None
    for item in items:
        ((action, found),) = item.items()
        status = int(found["status"])
        if status < 300 or status == 409 or (action == "delete" and status == 404):
            continue
        place = f"{found.get('_index')}/{found.get('_id')}"
        words = f"{action} of {place}: {status} {found.get('error')}"
        if status == 429 or status >= 500:
            raise SinkUnavailable(words[:500])
        refusal = refusal or RowRefused(f"the search server refused the {words}"[:500])
    if refusal is not None:
        raise refusal
