"""Decisions about runs: what a client reads, and what the applier merges.  Pure functions.

Both rest on one fact.  Replaying adjacent runs in order from the state at t gives the state at
their end; and since a compacted run stores the last state of each key that changed in its
range, its rows after t are exactly the net changes since t, for any t inside the range.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from databus.bootstrap.runs.manifest import Manifest
from databus.bootstrap.runs.parquet_runs import Run, RunKind
from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import LogTooYoung

MERGE_COUNT = 4
"""Runs of similar size that make a merge worth while."""

BASE_SHARE = 0.25
"""The base is rewritten when the runs after it are this part of it."""

SMALL_BASE_BYTES = 32 << 20
"""Below this size the base is rewritten at every apply: it costs less than deciding."""


@dataclass(frozen=True, slots=True)
class PlanStep:
    """Read the rows of ``run`` after ``after``; then the state is that at ``run.stop``."""

    run: Run
    after: Position


def plan(manifest: Manifest, since: Position, log_start: Position) -> tuple[PlanStep, ...]:
    """The cheapest chain of runs from ``since`` to where the hot log begins.

    Empty if the hot log alone covers it.  From the origin, the base is used if there is one.
    From other positions it cannot be used, because it has no tombstones.  Costs are frame bytes.

    Raises:
        LogTooYoung: the runs do not reach back to ``since``.
    """
    if since >= log_start:
        return ()
    if since != ORIGIN:
        return chain(manifest, since, log_start)
    if manifest.base is None:
        first = manifest.chain[0].start if manifest.chain else log_start
        return chain(manifest, first, log_start)
    # Retention may have taken the chain's beginning, so that it cannot replace the base.
    starts = {manifest.base.stop: (PlanStep(manifest.base, ORIGIN),)}
    return _cheapest(manifest, starts, log_start)


def chain(manifest: Manifest, since: Position, upto: Position) -> tuple[PlanStep, ...]:
    """The cheapest runs that lead from ``since`` to ``upto`` or beyond, without the base.

    Raises:
        LogTooYoung: the runs do not reach back to ``since``.
    """
    return _cheapest(manifest, {since: ()}, upto)


def _cheapest(
    manifest: Manifest, starts: Mapping[Position, tuple[PlanStep, ...]], upto: Position
) -> tuple[PlanStep, ...]:
    """The path of least bytes from one of ``starts`` over the chain's runs to ``upto``."""
    best = {
        position: (sum(step.run.bytes_after(step.after) for step in steps), steps)
        for position, steps in starts.items()
    }
    for run in sorted(manifest.chain, key=lambda run: (run.stop, run.start)):
        for position, (cost, steps) in sorted(best.items()):
            if run.start <= position < run.stop:
                total = cost + run.bytes_after(position)
                if run.stop not in best or total < best[run.stop][0]:
                    best[run.stop] = (total, (*steps, PlanStep(run, position)))
    reached = [found for position, found in best.items() if position >= upto]
    if not reached:
        since = min(starts)
        oldest = manifest.chain[0].start if manifest.chain else upto
        raise LogTooYoung(
            f"position {since} is older than the bootstrap log's oldest {oldest}; its state "
            "cannot be brought up to date; build it again",
            since=since.to_json(),
            oldest=oldest.to_json(),
        )
    return min(reached, key=lambda found: found[0])[1]


@dataclass(frozen=True, slots=True)
class PlanPart:
    """Read the rows of ``run`` in (after, upto]."""

    run: Run
    after: Position
    upto: Position


@dataclass(frozen=True, slots=True)
class Cover:
    """Everything in (``start``, ``stop``], in order; what follows ``stop`` is in the hot log."""

    start: Position
    parts: tuple[PlanPart, ...]

    @property
    def stop(self) -> Position:
        """Where the runs end."""
        return self.parts[-1].upto if self.parts else self.start


def cover(
    manifest: Manifest,
    starts: Mapping[Position, tuple[PlanPart, ...]],
    until: Position,
    log_start: Position,
    *,
    every_change: bool,
) -> Cover:
    """The cheapest runs from one of ``starts`` to ``until``, or to where the hot log begins.

    A segment may be cut at ``until``.  A compacted run may not: the state of a key at
    ``until`` is gone from it if the key changed again inside the run.  With ``every_change``
    only segments serve.  Retired runs serve as long as they are on disk.

    Raises:
        LogTooYoung: there is no such chain; with the oldest position that one can start from,
            or with the positions next to ``until`` that can be requested.
    """
    goal = min(until, log_start)
    best = {start: (sum(p.run.frame_bytes for p in ps), start, ps) for start, ps in starts.items()}
    by_id = {run.id: run for run in (*manifest.chain, *(r.run for r in manifest.retired))}
    for run in sorted(by_id.values(), key=lambda run: (run.stop, run.start)):
        cut = not run.is_compacted
        if run.kind is RunKind.BASE or not (cut or (run.stop <= until and not every_change)):
            continue
        upto = min(run.stop, until)
        for position, (cost, start, parts) in sorted(best.items()):
            total = cost + run.bytes_after(position)
            if run.start <= position < upto and (upto not in best or total < best[upto][0]):
                best[upto] = (total, start, (*parts, PlanPart(run, position, upto)))
    reached = [found for position, found in best.items() if position >= goal]
    if reached:
        _, start, parts = min(reached, key=lambda found: found[0])
        return Cover(start, parts)
    raise _not_covered(manifest, best, until, log_start, every_change=every_change)


def oldest_of(manifest: Manifest, log_start: Position, *, every_change: bool) -> Position:
    """The oldest position after which the net changes, or all changes, are retained."""
    oldest = manifest.stop or log_start
    for run in reversed(manifest.chain):
        if every_change and run.is_compacted:
            break
        oldest = run.start
    return oldest


def _not_covered(
    manifest: Manifest,
    reached: Collection[Position],
    until: Position,
    log_start: Position,
    *,
    every_change: bool,
) -> LogTooYoung:
    oldest = oldest_of(manifest, log_start, every_change=every_change)
    if not reached and manifest.base is not None:
        return _before_the_base(manifest.base.stop, until, oldest)
    since = min(reached, default=ORIGIN)
    if not reached or since < oldest:
        what = "all changes are retained" if every_change else "the log reaches back"
        return LogTooYoung(
            f"{since} is too old: {what} to {oldest}, no further",
            since=since.to_json(),
            oldest=oldest.to_json(),
        )
    before = max(reached)
    after = min((run.stop for run in manifest.chain if run.stop > until), default=log_start)
    return LogTooYoung(
        f"the state at {until} is gone: the changes after {before} up to {after} have been "
        f"merged; request {before} or {after}",
        oldest=oldest.to_json(),
        before=before.to_json(),
        after=after.to_json(),
    )


def _before_the_base(base: Position, until: Position, oldest: Position) -> LogTooYoung:
    """``until`` lies before every base, and some changes since the log's beginning are gone.

    If the changes since ``until`` are retained, they and the state at the base complete each other.
    """
    return LogTooYoung(
        f"the state at {until} is gone: the snapshot is at {base}, and the changes from the log's "
        "beginning to it are no longer retained",
        oldest=base.to_json(),
        **({"after": base.to_json()} if oldest <= until else {}),
    )


@dataclass(frozen=True, slots=True)
class Merge:
    """Make one run of ``kind`` out of adjacent ``inputs``, oldest first.

    For a base the first input may be the old base; the other inputs stay in the chain, for
    returning clients.
    """

    inputs: tuple[Run, ...]
    kind: RunKind

    @property
    def retired(self) -> tuple[Run, ...]:
        """The inputs that the new run replaces."""
        if self.kind is RunKind.BASE:
            return tuple(run for run in self.inputs if run.kind is RunKind.BASE)
        return self.inputs

    @property
    def is_divisible(self) -> bool:
        """Whether its buckets can be done in parts: nothing is shuffled for it."""
        return all(run.is_clustered for run in self.inputs)

    @property
    def frame_bytes(self) -> int:
        """Bytes of the inputs' frames: what it reads, at most."""
        return sum(run.frame_bytes for run in self.inputs)

    @property
    def least_bytes(self) -> int:
        """What is read of it at once, at least; of one in parts that is a bucket, not counted."""
        return 0 if self.is_divisible else self.frame_bytes


def next_merge(
    manifest: Manifest,
    largest_bytes: int,
    *,
    full: bool = False,
    upto: Position | None = None,
    most_bytes: int | None = None,
) -> Merge | None:
    """The next merge that pays, None if there is none; runs beyond ``upto`` are not touched.

    The first base comes before everything: a new consumer needs it.

    Of the chain, the newest runs are merged while each is at most twice as large as all newer
    ones together, if those are ``MERGE_COUNT`` or more.  So the number of copies of a row grows
    with the logarithm of the changes.  A merged run stays below ``largest_bytes``.
    The base is rewritten when its changes are ``BASE_SHARE`` of it, or at once with ``full``.

    A merge of clustered runs can be done in parts.  So any other merge that has more than
    ``most_bytes`` is preceded by one that clusters runs, and the first base has fewer runs.  While
    a merge is unfinished its inputs stay: only runs after them are merged before it continues.
    """
    chain = tuple(run for run in manifest.chain if upto is None or run.stop <= upto)
    newer = tuple(run for run in chain if run.stop > manifest.snapshot)
    base = manifest.base
    unfinished = unfinished_merge(manifest)
    if base is None and unfinished is None:
        return Merge(_first(newer, most_bytes), RunKind.BASE) if newer else None
    end = unfinished.inputs[-1].stop if unfinished else ORIGIN
    group = _mergeable(tuple(run for run in chain if run.start >= end), largest_bytes)
    if len(group) >= MERGE_COUNT:
        return _clustering(Merge(group, RunKind.DELTA), most_bytes)
    if unfinished is not None:
        return unfinished
    if base is None or not newer:
        return None
    is_due = full or base.frame_bytes <= SMALL_BASE_BYTES
    is_due |= sum(run.bytes_after(base.stop) for run in newer) >= BASE_SHARE * base.frame_bytes
    return _clustering(Merge((base, *newer), RunKind.BASE), most_bytes) if is_due else None


def unfinished_merge(manifest: Manifest) -> Merge | None:
    """The merge of which the manifest has a part, None if there is none."""
    if manifest.unfinished is None:
        return None
    return Merge(manifest.unfinished_inputs, manifest.unfinished.kind)


def _clustering(merge: Merge, most_bytes: int | None) -> Merge:
    """The merge, or one that has to precede it because the merge is too large and not in parts.

    A base of format 1 is rewritten in one merge.
    """
    chain = [run for run in merge.inputs if run.kind is not RunKind.BASE]
    if most_bytes is None or merge.frame_bytes <= most_bytes or merge.is_divisible:
        return merge
    if len(chain) < len(merge.inputs) and not merge.inputs[0].is_clustered:
        return merge
    plain = itertools.dropwhile(lambda run: run.is_clustered, chain)
    group = tuple(itertools.takewhile(lambda run: not run.is_clustered, plain))
    return Merge(_first(group, most_bytes), RunKind.DELTA)


def _first(runs: tuple[Run, ...], most_bytes: int | None) -> tuple[Run, ...]:
    """The first runs that together have at most ``most_bytes``, one of them at least."""
    ends = itertools.accumulate(run.frame_bytes for run in runs)
    count = sum(most_bytes is None or end <= most_bytes for end in ends)
    return runs[: max(1, count)]


def _mergeable(chain: tuple[Run, ...], largest_bytes: int) -> tuple[Run, ...]:
    group: list[Run] = []
    total = 0
    for run in reversed(chain):
        if group and (run.frame_bytes > 2 * total or total + run.frame_bytes > largest_bytes):
            break
        group.insert(0, run)
        total += run.frame_bytes
    return tuple(group)


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of the chain is retained; a run beyond any of the bounds may be dropped.

    ``file_bytes`` on disk; changes committed after ``since_us``; ``scns`` behind the end.  None
    is no bound.
    """

    file_bytes: int | None = None
    since_us: int | None = None
    scns: int | None = None


def droppable(
    manifest: Manifest, retention: Retention | int, readers_at: Position | None = None
) -> tuple[Run, ...]:
    """The oldest runs of the chain that exceed the retention.

    Never a run that the base does not have yet, nor one that readers inside an older, retired base
    will need after it, nor one after ``readers_at``, the position of the last open reader, nor an
    input of an unfinished merge.  A number alone is a bound in bytes.
    """
    if isinstance(retention, int):
        retention = Retention(file_bytes=retention)
    bases = [old.run.stop for old in manifest.retired if old.run.kind is RunKind.BASE]
    inputs = [run.start for run in manifest.unfinished_inputs if run.kind is not RunKind.BASE]
    needed_from = min(
        [manifest.snapshot, *bases, *inputs[:1], *([readers_at] if readers_at else [])]
    )
    excess = 0
    if retention.file_bytes is not None:
        excess = sum(run.file_bytes for run in manifest.chain) - retention.file_bytes
    end = manifest.stop or ORIGIN
    gone: list[Run] = []
    for run in manifest.chain[:-1]:
        is_old = retention.since_us is not None and run.newest_us < retention.since_us
        is_far = retention.scns is not None and run.stop.scn + retention.scns < end.scn
        if run.stop > needed_from or not (excess > 0 or is_old or is_far):
            break
        gone.append(run)
        excess -= run.file_bytes
    return tuple(gone)
