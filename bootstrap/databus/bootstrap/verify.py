"""Compares a table of the source with the bootstrap server's copy of it, while both live.

Three steps.  The relay reads the whole table in chunks and answers with digests; the copy's
state, taken after that, shows which keys may differ.  Those are read again, by key, until both
sides are known around one moment: the rows at the source, then the copy once its log has come
past them.  A key that changed in between is looked at again, and in the end counted as in
flux: the stream itself is writing it.  Repair is a dump of the differing keys through the
relay, with deletions of those that are gone, so every consumer of the stream is mended too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import numpy as np

from databus.bootstrap.comparison import KeyRange, TableDigests, Verdict, by_key, judge
from databus.common import frame
from databus.common.checkpoint import ORIGIN, Position, decode_position
from databus.common.errors import (
    DatabusError,
    DumpFailed,
    FormatError,
    ServerUnavailable,
    UnsupportedChange,
    from_problem,
)
from databus.common.formats import FRAMES_TYPE
from databus.common.frame import FIRST_CONTROL_OP, FrameSplitter, Op
from databus.common.schema import Kind, SchemaSet, SourceSchema
from databus.common.values import to_json_value

CHUNK_ROWS = 20_000
KEYS_AT_ONCE = 500
ROUNDS = 6
POLL_S = 0.1
REACH_S = 60.0
DUMP_S = 3600.0
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=60.0)

Progress = Callable[[str, int], None]
_Opened = contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]


@dataclass(frozen=True, slots=True)
class Difference:
    """A row in which the copy is not the source.  ``key`` is Avro, ``shown_key`` the same as
    JSON; ``columns`` are those that differ, where both have the row."""

    verdict: Verdict
    key: bytes
    shown_key: list[Any]
    columns: list[str]
    keys: KeyRange | None


@dataclass(slots=True)
class Report:
    """What came out for one table."""

    source: str
    rows: int = 0
    at: Position | None = None
    differences: list[Difference] = field(default_factory=list)
    in_flux: int = 0
    repaired: bool = False
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether no row differs, or none does any more."""
        return not self.differences or self.repaired

    def ranges(self) -> list[tuple[KeyRange | None, int]]:
        """The key ranges that hold differences, with how many; None is outside of the source."""
        counts: dict[int, tuple[KeyRange | None, int]] = {}
        for one in self.differences:
            _, count = counts.get(id(one.keys), (None, 0))
            counts[id(one.keys)] = (one.keys, count + 1)
        return list(counts.values())

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "source": self.source,
            "rows": self.rows,
            "at": self.at.to_json() if self.at else None,
            "equal": self.is_equal,
            "differences": [
                {"verdict": str(one.verdict), "key": one.shown_key, "columns": one.columns}
                for one in self.differences
            ],
            "ranges": [
                {
                    "after": keys.after if keys else None,
                    "upto": keys.upto if keys else None,
                    "at_source": keys is not None,
                    "differences": count,
                }
                for keys, count in self.ranges()
            ],
            "in_flux": self.in_flux,
            "repaired": self.repaired,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the relay read of the source."""

    schema: SourceSchema
    low: Position
    high: int
    last_key: list[Any] | None
    done: bool
    content: bytes


class Verifier:
    """Compares and repairs the tables of one database.

    Owner: one task; ``async with`` opens and closes its connections.
    Raises: ServerUnavailable where relay or bootstrap server do not answer; what they answer.
    """

    def __init__(
        self,
        database: str,
        relay: str,
        bootstrap: str,
        *,
        chunk_rows: int = CHUNK_ROWS,
        progress: Progress | None = None,
    ) -> None:
        self.database = database
        self._relay = f"{relay.rstrip('/')}/v1/{database}"
        self._bootstrap = f"{bootstrap.rstrip('/')}/v1/{database}"
        self._chunk_rows = chunk_rows
        self._progress = progress or (lambda _source, _rows: None)
        self._session: aiohttp.ClientSession | None = None
        self._high = 0

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def sources(self) -> list[str]:
        """The names of the sources that the bootstrap server has."""
        document = await self._json("GET", f"{self._bootstrap}/sources")
        return [item["name"] for item in document["sources"]]

    async def verify(self, source: str, *, repair: bool = False) -> Report:
        """Compare one table; with ``repair`` make the copy equal and compare those keys again.

        Raises:
            UnsupportedChange: the table's keys cannot be asked for one by one.
            DumpFailed: the repair's dump did not end well.
        """
        started_s = time.monotonic()
        report = Report(source)
        digests, schema = await self._scan_source(source)
        report.rows = len(digests)
        report.at = await self._scan_copy(source, digests)
        keys = digests.candidates | await self._only_at_source(source, digests)
        await self._judge(source, keys, schema, digests, report)
        if repair and report.differences:
            await self._repair(source, report.differences)
            again = Report(source)
            mended = {one.key for one in report.differences}
            await self._judge(source, mended, schema, digests, again)
            report.repaired = not again.differences
        report.seconds = time.monotonic() - started_s
        return report

    # -- the whole table --

    async def _scan_source(self, source: str) -> tuple[TableDigests, SourceSchema]:
        digests = TableDigests()
        after: list[Any] | None = None
        count = 0
        while True:
            answer = await self._chunk(source, limit=self._chunk_rows, after=after)
            pairs = np.frombuffer(answer.content, dtype="<u8").reshape(-1, 2)
            upto = None if answer.done else answer.last_key
            digests.add(pairs, KeyRange(after, upto))
            count += len(pairs)
            self._progress(source, count)
            self._high = answer.high
            if answer.done:
                digests.sort()
                return digests, answer.schema
            after = answer.last_key

    async def _scan_copy(self, source: str, digests: TableDigests) -> Position:
        """Show the copy's whole state to ``digests``, once it has all that the source had."""
        await self._reached(self._high)
        stream = _FrameStream(self._open("snapshot", sources=source))
        async for block in stream:
            columns = frame.scan(block, verify=False)
            digests.observe(columns, memoryview(block))
        return stream.end

    async def _only_at_source(self, source: str, digests: TableDigests) -> set[bytes]:
        """The keys of rows that the copy has shown nothing of: their chunks are read again."""
        found: set[bytes] = set()
        for number in digests.left_over():
            keys = digests.ranges[number]
            after: list[Any] | None = keys.after
            while True:
                answer = await self._chunk(
                    source, limit=self._chunk_rows, after=after, upto=keys.upto, content="frames"
                )
                views = frame.iter_frames(answer.content)
                found.update(
                    key for key in (bytes(v.key) for v in views) if digests.is_left_over(key)
                )
                if answer.done:
                    break
                after = answer.last_key
        return found

    # -- the candidates, key by key --

    async def _judge(
        self,
        source: str,
        keys: set[bytes],
        schema: SourceSchema,
        digests: TableDigests,
        report: Report,
    ) -> None:
        """Find out which keys really differ; what keeps changing is left as in flux."""
        open_keys = set(keys)
        for _ in range(ROUNDS):
            if not open_keys:
                break
            open_keys = await self._judge_once(source, open_keys, schema, digests, report)
        report.in_flux = len(open_keys)

    async def _judge_once(
        self,
        source: str,
        keys: set[bytes],
        schema: SourceSchema,
        digests: TableDigests,
        report: Report,
    ) -> set[bytes]:
        """One look at both sides; returns the keys that were changed in between."""
        listed = sorted(keys)
        rows: dict[bytes, bytes] = {}
        low: Position | None = None
        shown = {key: self._shown(schema, key) for key in listed}
        for at in range(0, len(listed), KEYS_AT_ONCE):
            batch = [shown[key] for key in listed[at : at + KEYS_AT_ONCE]]
            answer = await self._chunk(source, limit=len(batch), keys=batch, content="frames")
            low = low or answer.low
            schema = answer.schema
            for view in frame.iter_frames(answer.content):
                rows[bytes(view.key)] = bytes(view.after or b"")
            self._high = answer.high
        await self._reached(self._high)
        wanted = frozenset(keys)
        copy = by_key(
            [b async for b in _FrameStream(self._open("snapshot", sources=source))], wanted
        )
        assert low is not None
        since = f"{low.scn}:{low.seq}"
        changes = self._open("changes", sources=source, since=since, mode="net")
        moved = set(by_key([block async for block in _FrameStream(changes)], wanted))
        schemas = await self._schemas(source)
        for key in listed:
            if key in moved:
                continue
            verdict, columns = judge(rows.get(key), copy.get(key, ()), schemas, schema)
            keys_range = digests.range_of(key)
            if verdict is Verdict.EXTRA and keys_range is not None:
                # It was there when the table was read and nothing has deleted it since.
                raise FormatError(
                    f"{source} does not find the key {shown[key]} that it has listed before; "
                    f"nothing was repaired"
                )
            if verdict is not Verdict.EQUAL:
                report.differences.append(Difference(verdict, key, shown[key], columns, keys_range))
        return moved

    @staticmethod
    def _shown(schema: SourceSchema, key: bytes) -> list[Any]:
        values = schema.decode_key(key)
        return [to_json_value(values[column.name], column.kind) for column in schema.key_columns]

    # -- repair --

    async def _repair(self, source: str, differences: Sequence[Difference]) -> None:
        """Dump the rows that differ, and have those deleted that the source has not."""
        request = {
            "sources": [source],
            "keys": [one.shown_key for one in differences],
            "delete_missing": True,
        }
        dump = await self._json("POST", f"{self._relay}/dumps", request)
        deadline_s = time.monotonic() + DUMP_S
        while dump["state"] not in ("completed", "failed", "cancelled"):
            if time.monotonic() > deadline_s:
                raise DumpFailed(f"dump {dump['id']} is {dump['state']} after {DUMP_S:g} s")
            await asyncio.sleep(POLL_S)
            dump = await self._json("GET", f"{self._relay}/dumps/{dump['id']}")
        if dump["state"] != "completed":
            raise DumpFailed(f"dump {dump['id']} of {source} {dump['state']}: {dump['error']}")
        await self._target(decode_position(dump["end"]))

    # -- asking --

    async def _chunk(self, source: str, **question: Any) -> _Answer:
        url = f"{self._relay}/chunks"
        body = await self._bytes("POST", url, {"source": source, **question})
        size = int.from_bytes(body[:4], "little")
        header = json.loads(body[4 : 4 + size])
        schema = SourceSchema.from_json(header["schema"])
        if any(column.kind is Kind.BYTES for column in schema.key_columns):
            raise UnsupportedChange(
                f"{source} has binary columns in its key; its rows cannot be asked for by key yet"
            )
        return _Answer(
            schema,
            decode_position(header["low"]),
            int(header["high"]),
            header["last_key"],
            bool(header["done"]),
            body[4 + size :],
        )

    async def _schemas(self, source: str) -> SchemaSet:
        document = await self._json("GET", f"{self._bootstrap}/register", sources=source)
        return SchemaSet(SourceSchema.from_json(one["schema"]) for one in document["schemas"])

    async def _reached(self, scn: int) -> None:
        """Wait until the copy's log has come past ``scn``."""
        await self._target(Position(scn, 0))

    async def _target(self, wanted: Position) -> None:
        deadline_s = time.monotonic() + REACH_S
        while True:
            target = decode_position(await self._json("GET", f"{self._bootstrap}/targetSCN"))
            if target >= wanted:
                return
            if time.monotonic() > deadline_s:
                raise ServerUnavailable(
                    f"the log of {self.database} is at {target} and has not come to {wanted} "
                    f"within {REACH_S:g} s; is its writer running?"
                )
            await asyncio.sleep(POLL_S)

    async def _json(self, method: str, url: str, body: Any = None, **query: str) -> dict[str, Any]:
        document = json.loads(await self._bytes(method, url, body, **query))
        if not isinstance(document, dict):
            raise ServerUnavailable(f"{url} answered {str(document)[:100]}, not an object")
        return document

    async def _bytes(self, method: str, url: str, body: Any = None, **query: str) -> bytes:
        async with self._request(method, url, body, query) as answer:
            return await answer.read()

    def _open(self, what: str, **query: str) -> _Opened:
        return self._request("GET", f"{self._bootstrap}/{what}", None, query)

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, url: str, body: Any, query: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise ServerUnavailable("the connections are closed")
        headers = {"Accept": FRAMES_TYPE if method == "GET" else "*/*"}
        try:
            async with self._session.request(
                method, url, json=body, params=query, headers=headers
            ) as answer:
                if answer.status >= 400:
                    raise await _problem(answer, url)
                yield answer
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise ServerUnavailable(f"{url} does not answer: {reason}") from error


async def _problem(answer: aiohttp.ClientResponse, url: str) -> DatabusError:
    text = await answer.read()
    try:
        return from_problem(json.loads(text))
    except (ValueError, TypeError, KeyError):
        return ServerUnavailable(f"{url} answered {answer.status}: {text[:200]!r}")


class _FrameStream:
    """The frames of an answer, block by block; ``end`` is the checkpoint that ends it.

    Raises: ServerUnavailable if the answer broke off; the error that the server put into it.
    """

    def __init__(self, opened: _Opened) -> None:
        self.end = ORIGIN
        self._opened = opened

    async def __aiter__(self) -> AsyncIterator[bytes]:
        splitter = FrameSplitter()
        is_whole = False
        async with self._opened as answer:
            async for chunk in answer.content.iter_any():
                block = splitter.feed(chunk)
                if not block:
                    continue
                columns = frame.scan(block, verify=False)
                controls = np.flatnonzero(columns.op >= FIRST_CONTROL_OP)
                for index in controls.tolist():
                    view = frame.trusted_frame(memoryview(block), int(columns.offset[index]))
                    if view.op == Op.ERROR:
                        raise from_problem(json.loads(bytes(view.after or b"{}")))
                    if view.op == Op.CHECKPOINT:
                        is_whole, self.end = True, view.position
                yield block
        if not is_whole:
            raise ServerUnavailable("the bootstrap server's answer broke off; ask again")
