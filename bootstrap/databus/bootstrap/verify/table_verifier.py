"""Compares a table of the source with the bootstrap server's copy of it, while both change.

Three steps.  The relay reads the whole table in chunks and answers with digests; the copy's
state, taken after that, shows which keys may differ.  Those are read again, by key, until both
sides are known around one moment: the rows at the source, then the copy once its log has passed
them.  A key that changed in between is read again, and in the end counted as in flux: the
stream itself is writing it.  Repair is a dump of the differing keys through the
relay, with deletions of those that are gone, so every consumer of the stream is repaired too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from databus.bootstrap.verify.table_claims import OPERATOR, TableClaim
from databus.bootstrap.verify.table_comparison import (
    KeyRange,
    ReturnedColumns,
    TableComparison,
    TableDigests,
    WantedFrames,
    compare_row,
)
from databus.bootstrap.verify.table_copy import Copy, HttpPeer
from databus.common.checkpoint import Position, decode_position
from databus.common.errors import (
    DatabusError,
    DumpFailed,
    FormatError,
    ServerUnavailable,
    UnsupportedChange,
)
from databus.common.frame import frame_format
from databus.common.schema.source_schema import SourceSchema

CHUNK_ROWS = 20_000
KEYS_AT_ONCE = 500
ROUNDS = 6
POLL_S = 0.1
REACH_S = 60.0
DUMP_S = 3600.0
KEYS_OF_DUMP = 20_000
MOST_REPAIRED = 200_000
"""With more differing keys than this, a table is dumped rather than repaired."""

Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A row in which the copy and the source differ.  ``key`` is Avro, ``shown_key`` the same as
    JSON; ``columns`` are those that differ, if both have the row."""

    result: TableComparison
    key: bytes
    shown_key: list[Any]
    columns: list[str]
    keys: KeyRange | None


@dataclass(slots=True)
class Report:
    """The result for one table."""

    source: str
    rows: int = 0
    at: Position | None = None
    differences: list[RowDifference] = field(default_factory=list)
    in_flux: int = 0
    retained: int = 0
    """Rows that the source deleted and the copy retains: ``skipped_operations`` has "d"."""
    repaired: bool = False
    is_followed: bool = True
    """False: the relay has suspended the table again during the repair."""
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether no row differs, or none differs any more."""
        return not self.differences or self.repaired

    def ranges(self) -> list[tuple[KeyRange | None, int]]:
        """The key ranges with differences, and their number; None is outside of the source."""
        counts: dict[int, tuple[KeyRange | None, int]] = {}
        for one in self.differences:
            _, count = counts.get(id(one.keys), (None, 0))
            counts[id(one.keys)] = (one.keys, count + 1)
        return list(counts.values())

    def to_json(self) -> dict[str, Any]:
        """The whole report."""
        return {
            "source": self.source,
            "rows": self.rows,
            "at": self.at.to_json() if self.at else None,
            "equal": self.is_equal,
            "differences": [
                {"verdict": str(one.result), "key": one.shown_key, "columns": one.columns}
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
            "kept": self.retained,
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
    skips_deletes: bool
    key_count: int | None
    content: bytes


class Verifier:
    """Compares and repairs the tables of one database.

    Owner: one task.
    Raises: ServerUnavailable if the relay does not answer or the copy does not advance; the errors
        of relay and copy.
    """

    def __init__(
        self,
        relay: HttpPeer,
        copy: Copy,
        *,
        chunk_rows: int = CHUNK_ROWS,
        progress: Progress | None = None,
        by: str = OPERATOR,
    ) -> None:
        self._relay = relay
        self._copy = copy
        self._chunk_rows = chunk_rows
        self._progress = progress or (lambda _source, _rows: None)
        self._by = by

    async def verify(self, source: str, *, repair: bool = False) -> Report:
        """Compare one table; with ``repair`` make the copy equal and compare those keys again.

        A suspended table is claimed for its repair, and is followed after it.

        Raises:
            FormatError: the source does not find by key what it has listed.
            DumpFailed: the repair's dump failed, or too many rows differ.
            ServerUnavailable: another process resynchronises the table.
        """
        if not repair:
            return await self._verify(source, repair=False)
        claim = TableClaim(self._relay, source, self._by)
        await claim.take()
        try:
            report = await self._verify(source, repair=True, returned=claim.returned)
        except DatabusError as error:
            for_good = isinstance(error, UnsupportedChange) or "candidates" in error.details
            await claim.give_up(error.message, for_good=for_good)
            raise
        if report.is_equal:
            report.is_followed = await claim.done()
        else:
            await claim.give_up(f"{len(report.differences)} rows differ after their repair")
        return report

    async def _verify(self, source: str, *, repair: bool, returned: Sequence[str] = ()) -> Report:
        started_s = time.monotonic()
        report = Report(source)
        digests, high = await self._scan_source(source)
        report.rows = len(digests)
        report.at = await self._reached(Position(high, 0))
        digests.returned = ReturnedColumns(tuple(returned), report.at)
        known = await self._copy.schemas(source)
        async for block in self._copy.state(source):
            digests.observe(frame_format.scan(block, verify=False), memoryview(block), known)
        if (latest := known.latest(source)) is not None:
            digests.compare_key(latest)  # Other readers have rows, where this copy has none.
        if repair and digests.has_other_keys:
            # Such rows can neither be read at the source nor deleted by the key that it has now.
            raise UnsupportedChange(f"the copy has rows of {source} under another key; dump it")
        keys = digests.candidates | await self._only_at_source(source, digests)
        if repair and len(keys) > MOST_REPAIRED:
            raise DumpFailed(
                f"{len(keys)} rows of {source} may differ, more than the {MOST_REPAIRED} that are "
                f"repaired one by one; dump the table",
                candidates=len(keys),
            )
        moving = await self._compare_keys(keys, digests, report)
        if repair and (report.differences or moving):
            report.at = await self._repair(source, report.differences, moving)
            again = Report(source)
            await self._compare_keys({one.key for one in report.differences}, digests, again)
            report.repaired = not again.differences
        report.seconds = time.monotonic() - started_s
        return report

    # -- the whole table --

    async def _scan_source(self, source: str) -> tuple[TableDigests, int]:
        """The digests of all rows, and an scn that is not below any of theirs."""
        digests = TableDigests()
        after: list[Any] | None = None
        count = high = 0
        while True:
            answer = await self._chunk(source, limit=self._chunk_rows, after=after)
            pairs = np.frombuffer(answer.content, dtype="<u8").reshape(-1, 2)
            upto = None if answer.done else answer.last_key
            digests.add(pairs, KeyRange(after, upto), answer.schema)
            count, high = count + len(pairs), max(high, answer.high)
            self._progress(source, count)
            if answer.done:
                digests.sort()
                return digests, high
            after = answer.last_key

    async def _only_at_source(self, source: str, digests: TableDigests) -> set[bytes]:
        """The keys of rows that the copy has not shown: their chunks are read again."""
        found: set[bytes] = set()
        for number in digests.left_over():
            keys = digests.ranges[number]
            after, done = keys.after, False
            while not done:
                answer = await self._chunk(
                    source, limit=self._chunk_rows, after=after, upto=keys.upto, content="frames"
                )
                here = (bytes(view.key) for view in frame_format.iter_frames(answer.content))
                found.update(key for key in here if digests.is_left_over(key))
                after, done = answer.last_key, answer.done
        return found

    # -- the candidates, key by key --

    async def _compare_keys(
        self, keys: set[bytes], digests: TableDigests, report: Report
    ) -> set[bytes]:
        """Find out which keys really differ; returns those that keep changing, in flux."""
        undecided = keys
        for _ in range(ROUNDS):
            if not undecided:
                break
            undecided = await self._compare_once(sorted(undecided), digests, report)
        report.in_flux = len(undecided)
        return undecided

    async def _compare_once(
        self, keys: list[bytes], digests: TableDigests, report: Report
    ) -> set[bytes]:
        """One comparison of both sides; returns the keys that were changed in between."""
        source = report.source
        known = await self._copy.schemas(source)
        schema = known.latest(source)
        if schema is None:
            raise FormatError(f"the copy has no schema of {source}")
        shown = {key: schema.key_json(key) for key in keys}
        rows, low, high, last = await self._rows(source, [shown[key] for key in keys])
        schema = last.schema
        await self._reached(Position(high, 0))
        copy, changes = WantedFrames(keys), WantedFrames(keys)
        async for block in self._copy.state(source):
            copy.observe(block)
        async for block in self._copy.changes(source, low):
            changes.observe(block)
        moved = changes.found.keys()
        known = await self._copy.schemas(source)
        for key in keys:
            if key in moved:
                continue
            frames = copy.found.get(key, ())
            result, columns = compare_row(rows.get(key), frames, known, schema, digests.returned)
            key_range = digests.range_of(key)
            if result is TableComparison.EXTRA and key_range is not None:
                # It was there when the table was read, and was not deleted since.
                raise FormatError(
                    f"{source} does not find the key {shown[key]}, which it has listed before"
                )
            if result is TableComparison.EXTRA and last.skips_deletes:
                report.retained += 1
            elif result is not TableComparison.EQUAL:
                report.differences.append(
                    RowDifference(result, key, shown[key], columns, key_range)
                )
        return set(moved)

    async def _rows(
        self, source: str, keys: list[list[Any]]
    ) -> tuple[dict[bytes, bytes], Position, int, _Answer]:
        """The rows with these keys; the source's clock before and after the read."""
        rows: dict[bytes, bytes] = {}
        answers: list[_Answer] = []
        at = 0
        while at < len(keys):
            batch = keys[at : at + KEYS_AT_ONCE]
            answer = await self._chunk(source, limit=len(batch), keys=batch, content="frames")
            for view in frame_format.iter_frames(answer.content):
                rows[bytes(view.key)] = bytes(view.after or b"")
            answers.append(answer)
            at += len(batch) if answer.key_count is None else answer.key_count
        high = max(answer.high for answer in answers)
        return rows, answers[0].low, high, answers[-1]

    # -- repair --

    async def _repair(
        self, source: str, differences: Sequence[RowDifference], moving: set[bytes]
    ) -> Position:
        """Dump the rows that differ or keep changing; delete those that the source has not."""
        keys = [one.shown_key for one in differences]
        schema = (await self._copy.schemas(source)).latest(source) if moving else None
        if schema is not None:
            keys += [schema.key_json(key) for key in sorted(moving)]
        end = await self._copy.end()
        for at in range(0, len(keys), KEYS_OF_DUMP):
            end = await self._dump(source, keys[at : at + KEYS_OF_DUMP])
        return end

    async def _dump(self, source: str, keys: list[list[Any]]) -> Position:
        request = {
            "sources": [source],
            "keys": keys,
            "delete_missing": True,
            "reader": (await self._copy.end()).to_json(),
        }
        dump = await self._relay.document("POST", "dumps", request)
        deadline_s = time.monotonic() + DUMP_S
        while dump["state"] not in ("completed", "failed", "cancelled"):
            if time.monotonic() > deadline_s:
                raise DumpFailed(f"dump {dump['id']} is {dump['state']} after {DUMP_S:g} s")
            await asyncio.sleep(POLL_S)
            reader = (await self._copy.end()).to_json()
            dump = await self._relay.document("PATCH", f"dumps/{dump['id']}", {"reader": reader})
        if dump["state"] != "completed":
            raise DumpFailed(f"dump {dump['id']} of {source} {dump['state']}: {dump['error']}")
        return await self._reached(decode_position(dump["end"]))

    # -- requests --

    async def _chunk(self, source: str, **question: Any) -> _Answer:
        body = await self._relay.body("POST", "chunks", {"source": source, **question})
        size = int.from_bytes(body[:4], "little")
        header = json.loads(body[4 : 4 + size])
        schema = SourceSchema.from_json(header["schema"])
        return _Answer(
            schema,
            decode_position(header["low"]),
            int(header["high"]),
            header["last_key"],
            bool(header["done"]),
            "d" in header.get("skipped_operations", ()),
            header.get("key_count"),
            body[4 + size :],
        )

    async def _reached(self, wanted: Position) -> Position:
        """Wait until the copy has everything up to ``wanted``; returns where it is then."""
        deadline_s = time.monotonic() + REACH_S
        while (end := await self._copy.end()) < wanted:
            if time.monotonic() > deadline_s:
                raise ServerUnavailable(
                    f"the copy's log is at {end} and has not reached {wanted} within "
                    f"{REACH_S:g} s; is its writer running?"
                )
            await asyncio.sleep(POLL_S)
        return end
