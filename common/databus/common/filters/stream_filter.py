"""Server-side filters: which frames of a block a reader requests.

A filter looks at columns (source, op, key hash, key), never at decoded events, so that the
relay and the bootstrap server select with the same code at the speed of numpy.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from databus.common.compiled import kernels
from databus.common.errors import BadFilter, UnknownSource
from databus.common.frame import frame_format
from databus.common.frame.frame_format import (
    FIRST_CONTROL_OP,
    HEADER_BYTES,
    OPS_BY_LETTER,
    FrameColumns,
    Op,
)
from databus.common.spelling import nearest

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ModPartition:
    """Keys whose hash modulo ``count`` is one of ``buckets``."""

    count: int
    buckets: frozenset[int]

    def mask(self, columns: FrameColumns, block: npt.NDArray[np.uint8]) -> Mask:
        """Which frames lie in the partition."""
        if self.count & (self.count - 1):
            buckets = columns.key_hash % np.uint64(self.count)
        else:  # the same, without a division for each frame
            buckets = columns.key_hash & np.uint64(self.count - 1)
        return is_among(buckets, _sorted_numbers(self.buckets))


@dataclass(frozen=True, slots=True)
class RangePartition:
    """Keys whose first column, a number, divided by ``size`` is in ``first`` .. ``last``.

    Meant for tables whose key begins with an integer.  For another key the number is its first
    bytes, decoded as an Avro long.
    """

    size: int
    first: int
    last: int

    def mask(self, columns: FrameColumns, block: npt.NDArray[np.uint8]) -> Mask:
        """Which frames lie in the partition."""
        numbers = np.empty(len(columns), dtype=np.int64)
        _first_numbers(block, columns.offset + HEADER_BYTES, columns.key_len, numbers)
        bucket = numbers // self.size
        return np.asarray((bucket >= self.first) & (bucket <= self.last))


@dataclass(frozen=True, slots=True)
class HashPartition:
    """Keys whose hash lies in one of ``count`` equal ranges of all hashes: one of ``buckets``.

    The files of merged runs are ranges of hashes too, so a bootstrap server opens a part of them.
    """

    count: int
    buckets: frozenset[int]

    def bucket(self, key_hash: int) -> int:
        """The range that a hash lies in, from its upper half."""
        return (key_hash >> 32) * self.count >> 32

    def mask(self, columns: FrameColumns, block: npt.NDArray[np.uint8]) -> Mask:
        """Which frames lie in the partition."""
        upper = columns.key_hash >> np.uint64(32)
        buckets = upper * np.uint64(self.count) >> np.uint64(32)
        return is_among(buckets, _sorted_numbers(self.buckets))


Partition = ModPartition | HashPartition | RangePartition


@kernels.jit
def _first_numbers(
    block: kernels.U8Array,
    starts: kernels.I64Array,
    lengths: npt.NDArray[np.uint32],
    out: kernels.I64Array,
) -> None:
    """Read the Avro long at the start of each key into ``out``; 0 if there is none."""
    for index in range(len(starts)):
        at = starts[index]
        stop = at + min(kernels.i64(lengths[index]), 10)
        value = kernels.i64(0)
        shift = 0
        while at < stop:
            byte = kernels.i64(block[at])
            value |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if byte < 0x80:
                break
        out[index] = ((value >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(value & 1)


@dataclass(frozen=True, slots=True)
class StreamFilter:
    """What a reader requests; the empty filter takes everything.

    ``sources`` are globs over source names, ``ops`` the letters' ops.  ``granted``, if it has
    globs, are the only sources that this reader may get.
    """

    sources: tuple[str, ...] = ()
    ops: frozenset[Op] = frozenset()
    partition: Partition | None = None
    granted: tuple[str, ...] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether every frame is taken."""
        return not self.ops and self.partition is None and self.takes_every_source

    @property
    def takes_every_source(self) -> bool:
        """Whether no source is left out."""
        return (not self.sources or "*" in self.sources) and self.granted is None

    def takes_source(self, name: str) -> bool:
        """Whether a source's name matches one of the globs."""
        if self.granted is not None and not matches(name, self.granted):
            return False
        return not self.sources or matches(name, self.sources)

    def mask(
        self,
        columns: FrameColumns,
        block: npt.NDArray[np.uint8],
        source_ids: npt.NDArray[np.uint32],
    ) -> Mask:
        """Which frames of ``block`` are taken: bool, one entry a frame.

        ``source_ids`` are the numbers of the sources that ``takes_source`` accepts, ascending.
        Control frames without a source (end of window and the like) are never taken here: the
        stream decides about them.
        """
        ops = columns.op
        rows = columns.source_id != 0
        taken: Mask = (
            rows if self.takes_every_source else rows & is_among(columns.source_id, source_ids)
        )
        is_row = ops < FIRST_CONTROL_OP
        if self.ops:
            taken = taken & (is_among(ops, _sorted_numbers(self.ops)) | ~is_row)
        if self.partition is not None:
            # A truncate concerns the keys of every partition.
            is_key = is_row & (ops != Op.TRUNCATE)
            taken = taken & (self.partition.mask(columns, block) | ~is_key)
        return taken


def is_among(values: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> Mask:
    """Which values are in ``wanted``, which ascends.

    As ``np.isin``, whose overhead for a block of a few frames is a hundred times that of a
    look-up.
    """
    if not len(wanted):
        return np.zeros(len(values), dtype=np.bool_)
    if len(wanted) == 1:
        single: Mask = values == wanted[0]
        return single
    indexes = wanted.searchsorted(values)
    indexes[indexes == len(wanted)] = 0
    found: Mask = wanted[indexes] == values
    return found


@functools.lru_cache(maxsize=1024)
def _sorted_numbers(numbers: frozenset[int]) -> npt.NDArray[np.uint64]:
    return np.fromiter(sorted(numbers), dtype=np.uint64)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a source's name matches one of the globs, case and all."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match one of the globs, in their order; plain names cost a look-up each."""
    if any(_WILD & set(pattern) for pattern in patterns):
        return [name for name in names if matches(name, patterns)]
    plain = frozenset(patterns)
    return [name for name in names if name in plain]


def require_sources(
    database: str,
    known: Sequence[str],
    patterns: tuple[str, ...],
    granted: tuple[str, ...] | None = None,
) -> list[str]:
    """The sources among ``known`` that match; all of them without patterns.

    With ``granted``, no other source is known to the caller.

    Raises:
        UnknownSource: a name without wildcards is unknown, or no pattern matches at all.
            While no source is known yet, every pattern may still match later.
    """
    if granted is not None:
        known = matching(known, granted)
    found = matching(known, patterns) if patterns else list(known)
    plain = [pattern for pattern in patterns if not _WILD & set(pattern)]
    for pattern in [*plain, *(() if found else patterns)]:
        if known and pattern not in known:
            raise UnknownSource(
                f"{database} has no source {pattern!r}{nearest(pattern, known)}",
                database=database,
                source=pattern,
            )
    return found


def matching_ids(names: Iterable[str], stream_filter: StreamFilter) -> npt.NDArray[np.uint32]:
    """The numbers of the sources among ``names`` that the filter takes."""
    for patterns in (stream_filter.granted, stream_filter.sources or None):
        names = names if patterns is None else matching(names, patterns)
    return np.array(sorted(map(frame_format.source_id, names)), dtype=np.uint32)


_WILD = frozenset("*?[")
_BY_HASH = re.compile(r"(mod|hash):(\d{1,9}):([\d,-]+)")
_BUCKETS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
MAX_BUCKETS = 1 << 16
"""Most buckets that a request may list: the server makes a set of them before the first event."""
_RANGE = re.compile(r"range:(\d{1,18}):(-?\d{1,18})(?:-(-?\d{1,18}))?")


def parse_partition(text: str) -> Partition:
    """``mod:16:3,7``, ``mod:16:0-3``, ``hash:16:0-3`` or ``range:10000:0-3``.

    Raises:
        BadFilter: it is none of them, or a bucket is out of range.
    """
    if found := _BY_HASH.fullmatch(text):
        count = int(found[2])
        buckets = _buckets(found[3], count, text)
        return (ModPartition if found[1] == "mod" else HashPartition)(count, buckets)
    if found := _RANGE.fullmatch(text):
        size, first = int(found[1]), int(found[2])
        last = int(found[3]) if found[3] else first
        if size < 1 or last < first:
            raise BadFilter(f"partition {text!r}: the size must be over 0 and the range ascend")
        return RangePartition(size, first, last)
    raise BadFilter(
        f"partition {text!r} is none of mod:COUNT:A,B, hash:COUNT:A,B and range:SIZE:A-B"
    )


def _buckets(text: str, count: int, whole: str) -> frozenset[int]:
    buckets: set[int] = set()
    left = MAX_BUCKETS
    for part in text.split(","):
        found = _BUCKETS.fullmatch(part)
        if found is None:
            raise BadFilter(
                f"partition {whole!r}: {part!r} is neither a bucket nor a range of buckets"
            )
        low, high = int(found[1]), int(found[2] or found[1])
        if not low <= high < count:
            raise BadFilter(f"partition {whole!r}: {part!r} is not within 0-{count - 1}")
        left -= high - low + 1
        if left < 0:
            raise BadFilter(
                f"partition {whole!r} lists more than {MAX_BUCKETS} buckets; take a smaller COUNT"
            )
        buckets.update(range(low, high + 1))
    return frozenset(buckets)


def parse_ops(text: str) -> frozenset[Op]:
    """``c,u,d,r`` or a part of it.

    Raises:
        BadFilter: a letter is not one of them.
    """
    letters = [letter.strip() for letter in text.split(",") if letter.strip()]
    unknown = [letter for letter in letters if letter not in OPS_BY_LETTER]
    if unknown or not letters:
        raise BadFilter(f"ops {text!r}: {unknown} are not among {sorted(OPS_BY_LETTER)}")
    return frozenset(OPS_BY_LETTER[letter] for letter in letters)


def parse_sources(text: str) -> tuple[str, ...]:
    """``shop.*,audit.log``: globs, comma separated.

    Raises:
        BadFilter: none is given.
    """
    patterns = tuple(part.strip() for part in text.split(",") if part.strip())
    if not patterns:
        raise BadFilter(f"sources {text!r} names no source; leave it out to get all of them")
    return patterns
