"""``POST /v1/{db}/chunks``: rows of a table as the source has them now, not through the ring.

For tools that compare the source with a copy (``databus verify``): a chunk is read exactly as a
dump reads it, and answered instead of appended.  The answer is

    u32 LE length of the header | header, JSON | content

with the header's ``low`` (position that the ring had reached before the chunk was read: the rows
show every commit up to it), ``high`` (scn at or after every commit that they show), ``rows``,
``schema``, ``last_key``, ``done``, ``missing`` and ``key_count`` of contract.py's ``Chunk``, and
the database's ``skipped_operations``: with those a copy need not be equal.
The content is, with
``"content": "digests"``, a u64 LE key hash and a u64 LE xxh3 of the row's Avro bytes for each
row; with ``"frames"``, a READ frame for each row.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from databus.common.checkpoint import Position
from databus.common.compiled.xxh3 import xxh3_64_of_each
from databus.common.errors import BadRequest
from databus.common.frame.frame_format import Op, pack_frame
from databus.relay.sources.contract import Chunk, ChunkRequest
from databus.relay.sources.row_buffers import ROW_START, ROW_STOP

CHUNK_TYPE = "application/vnd.databus.chunk"
MAX_ROWS = 100_000
DEFAULT_ROWS = 20_000
CONTENTS = ("digests", "frames")
_KEYS = ("source", "limit", "after", "upto", "keys", "content")


@dataclass(frozen=True, slots=True)
class ChunkQuestion:
    """What to read, and the form of the answer."""

    request: ChunkRequest
    content: str


def parse_question(document: dict[str, Any]) -> ChunkQuestion:
    """The question in a request's body.

    Raises:
        BadRequest: a key is unknown or its value not of its form.
    """
    unknown = sorted(set(document) - set(_KEYS))
    if unknown:
        raise BadRequest(f"unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    source, content = document.get("source"), document.get("content", "digests")
    if not isinstance(source, str) or not source:
        raise BadRequest(f"source is {source!r}; give the name of one table")
    if content not in CONTENTS:
        raise BadRequest(f"content is {content!r}, neither {' nor '.join(CONTENTS)}")
    limit = document.get("limit", DEFAULT_ROWS)
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_ROWS:
        raise BadRequest(f"limit is {limit!r}, not a number from 1 to {MAX_ROWS}")
    keys = document.get("keys")
    if keys is not None:
        if not isinstance(keys, list) or not 1 <= len(keys) <= limit:
            raise BadRequest(f"keys must be a list of 1 to {limit} keys")
        keys = [key if isinstance(key, list) else [key] for key in keys]
    for name in ("after", "upto"):
        if not isinstance(document.get(name), list | None):
            raise BadRequest(f"{name} is {document[name]!r}; give a key as a list of its values")
    request = ChunkRequest(
        source, limit, after=document.get("after"), upto=document.get("upto"), keys=keys
    )
    return ChunkQuestion(request, str(content))


def pack_answer(
    question: ChunkQuestion, chunk: Chunk, low: Position, skipped_operations: Sequence[str] = ()
) -> bytes:
    """The answer's body; see the module's docstring."""
    header = {
        "source": chunk.schema.source,
        "schema": chunk.schema.to_json(),
        "low": low.to_json(),
        "high": chunk.snapshot.high,
        "rows": len(chunk.rows),
        "last_key": chunk.last_key,
        "done": chunk.done,
        "missing": chunk.missing,
        "key_count": chunk.key_count,
        "skipped_operations": list(skipped_operations),
    }
    text = json.dumps(header).encode()
    content = _digests(chunk) if question.content == "digests" else _frames(chunk)
    return b"".join((struct.pack("<I", len(text)), text, content))


def _digests(chunk: Chunk) -> bytes:
    rows = chunk.rows
    digests = xxh3_64_of_each(rows.data, rows.spans[:, ROW_START], rows.spans[:, ROW_STOP])
    return np.column_stack((rows.hashes, digests)).tobytes()


def _frames(chunk: Chunk) -> bytes:
    schema, scn = chunk.schema, chunk.snapshot.high
    return b"".join(
        pack_frame(
            op=Op.READ, scn=scn, seq=seq, source=schema.source_id,
            schema_fp=schema.fingerprint, commit_us=0, key=row.key, after=row.row,
        )
        for seq, row in enumerate(chunk.rows)
    )  # fmt: skip
