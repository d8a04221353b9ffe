"""Determines what a ring's file holds after its writer ended, in any way.

Killed, the writer leaves its live state, which the kernel keeps for as long as it runs.
After a power loss there are the two control copies of the last syncs, and a data area that
newer frames may partly have overwritten.  ``BASES`` and ``REPAIRS`` are the decisions for
every case; FORMAT.md describes them.

What is retained always ends where the chosen state ends: the source may have dropped
everything up to there, so a ring with less would hide a gap.  A ring with
more might, too: after a power loss there may be frames of a later lap after the
tail, whole but with others missing before them, and they stay there until they are overwritten.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from databus.common.checkpoint import Position
from databus.common.errors import FormatError, StoreError
from databus.common.frame import header_layout
from databus.common.frame.frame_format import trusted_frame
from databus.relay.ring import ring_kernels
from databus.relay.ring.ring_file import RingFile
from databus.relay.ring.ring_format import Control, RingState
from databus.relay.ring.scn_index import split

UNSEEN_BYTES = 1 << 40
"""Readers are never further beyond the last sync: used if their position is unknown."""


class Base(enum.Enum):
    """The origin of the state."""

    LIVE = "the live fields, with the newer whole control copy for what never changes"
    NEWER = "the control copy with the larger sequence"
    A = "control copy A"
    B = "control copy B"
    REFUSE = "nothing can be trusted: an error, the files stay as they are"


class Repair(enum.Enum):
    """How the range [head, tail) of that state is treated."""

    KEEP = "all of it is served"
    CUT = "served from the first window boundary after the damage on"
    EMPTY = "nothing is left to serve; the ring continues at its last position"


BASES: dict[tuple[bool, bool, bool], Base] = {
    # (live state of this boot, copy A whole, copy B whole)
    (True, True, True): Base.LIVE,
    (True, True, False): Base.LIVE,
    (True, False, True): Base.LIVE,
    (True, False, False): Base.REFUSE,
    (False, True, True): Base.NEWER,
    (False, True, False): Base.A,
    (False, False, True): Base.B,
    (False, False, False): Base.REFUSE,
}
REPAIRS: dict[tuple[bool, bool], Repair] = {
    # (frames lead from head to tail, frames lead from somewhere after head to tail)
    (True, True): Repair.KEEP,
    (True, False): Repair.KEEP,
    (False, True): Repair.CUT,
    (False, False): Repair.EMPTY,
}


class Recovered(NamedTuple):
    """The state to resume with, and how it was found."""

    control: Control
    state: RingState
    base: Base
    repair: Repair
    shown: int
    """Ring position up to which readers may have seen it; a later one than the state's tail
    means that frames after the last sync were lost, and that positions must not be used again."""


def frame_at(file: RingFile, position: int) -> tuple[Position, int]:
    """Position and commit time of the frame at a ring position."""
    frame = trusted_frame(file.view, file.file_offset(position))
    return frame.position, frame.commit_us


def skip_pad(file: RingFile, position: int) -> int:
    """``position``, or the start of the next lap if a pad lies there.

    Raises:
        FormatError: neither a frame nor the pad up to the lap's end lies there.
    """
    at = position % file.data_bytes
    lap_rest = file.data_bytes - at
    if ring_kernels.is_pad(file.data, at, lap_rest):
        return position + lap_rest
    if lap_rest < header_layout.HEADER_BYTES or not header_layout.is_header(file.data, at):
        raise file.damage(position)
    return position


def with_oldest(file: RingFile, state: RingState) -> RingState:
    """``state`` with ``min`` read from the frame at its head."""
    if state.is_empty:
        return state._replace(min=state.prev, min_commit_us=0)
    oldest, commit_us = frame_at(file, skip_pad(file, state.head))
    return state._replace(min=oldest, min_commit_us=commit_us)


def recover(file: RingFile) -> Recovered:
    """The state that the ring resumes with.  Reads only.

    Raises:
        StoreError: no control copy is whole.
    """
    first, second = file.read_controls()
    control = file.newest_control()
    live, is_damaged = file.live_state(), file.has_damaged_state
    if live is not None and live.tail < control.state.tail:
        live, is_damaged = None, True  # its epoch has gone back
    base = BASES[(live is not None, first is not None, second is not None)]
    state = control.state
    if base is Base.LIVE and live is not None:
        state = live
    if file.data_bytes != control.ring_bytes:
        raise StoreError(
            f"{file.path} has {file.data_bytes} bytes of data, its control page states "
            f"{control.ring_bytes}; it was cut or is a bad copy: move it away"
        )
    shown = state.tail
    if is_damaged:
        shown += UNSEEN_BYTES
    # What the live state counts as synced is newer than a control copy that was damaged later.
    synced = min(state.synced, control.state.synced) if base is Base.LIVE else 0
    whole = _leads_to_tail(file, state, synced)
    if not whole and base is Base.LIVE and _is_sound_before(file, control.state, state):
        # A failed sync loses pages in a running kernel too.  None of them was acknowledged.
        base, state, whole = Base.NEWER, _last_sync(control.state, state), True
    start = state.head if whole else _first_sound(file, state)
    repair = REPAIRS[(whole, start is not None)]
    if repair is Repair.CUT and start is not None:
        state = _cut(file, state, start)
    elif repair is Repair.EMPTY:
        # The source sends again what was not synced.
        newest = control.state if control.state.tail < state.tail else state
        state = _emptied(state, newest)
    return Recovered(control, with_oldest(file, state), base, repair, shown)


def without_damage(file: RingFile, state: RingState) -> RingState:
    """``state`` without the frames up to the last damaged one; all of it if there is none."""
    if _reaches_tail(file, state, state.head, split(state.prev)):
        return state
    start = _first_sound(file, state)
    return with_oldest(file, _emptied(state, state) if start is None else _cut(file, state, start))


def _emptied(state: RingState, newest: RingState) -> RingState:
    """``state`` with nothing left to serve, after the last position of ``newest``."""
    return state._replace(
        head=state.tail,
        prev=newest.max,
        max=newest.max,
        max_commit_us=newest.max_commit_us,
        evicted_frames=state.frames,
        evicted_windows=state.windows,
    )


def _leads_to_tail(file: RingFile, state: RingState, synced: int) -> bool:
    start, before = state.head, split(state.prev)
    if state.head < state.tail and not _has_frame(file, state.head):
        return False
    if state.head < synced <= state.tail:
        start, before = synced, (-1, 0, 0)
    return _reaches_tail(file, state, start, before)


def _has_frame(file: RingFile, position: int) -> bool:
    try:
        skip_pad(file, position)
    except FormatError:
        return False
    return True


def _last_sync(synced: RingState, live: RingState) -> RingState:
    """The state of the last sync, without the frames evicted since."""
    if live.head <= synced.head:
        return synced
    return synced._replace(
        head=live.head,
        prev=live.prev,
        evicted_frames=live.evicted_frames,
        evicted_windows=live.evicted_windows,
    )


def _is_sound_before(file: RingFile, synced: RingState, live: RingState) -> bool:
    """Whether the state of the last sync can be restored: it is whole."""
    if not live.head < synced.tail < live.tail:
        return False
    state = _last_sync(synced, live)
    return _reaches_tail(file, state, state.head, split(state.prev))


def _reaches_tail(
    file: RingFile, state: RingState, start: int, before: tuple[int, int, int]
) -> bool:
    stop, last, *_ = ring_kernels.follow(file.data, start, state.tail, *before)
    return stop == state.tail and (last < 0 or frame_at(file, last)[0] == state.max)


def _first_sound(file: RingFile, state: RingState) -> int | None:
    """First position after head from which undamaged frames lead to tail."""
    at = state.head
    while at < state.tail:
        start = ring_kernels.next_header(file.data, at, state.tail)
        if start < 0:
            return None
        stop, *_ = ring_kernels.follow(file.data, start, state.tail, -1, 0, 0)
        if stop == state.tail:
            return start if _reaches_tail(file, state, start, (-1, 0, 0)) else None
        at = max(stop, start + 8)
    return None


def _cut(file: RingFile, state: RingState, start: int) -> RingState:
    """``state`` from the first window boundary after ``start``: only there is prev known."""
    head, last, _, _ = ring_kernels.evict(file.data, start, start + 1, state.tail, state.tail)
    prev = frame_at(file, last)[0]
    _, _, frames, windows = ring_kernels.follow(file.data, head, state.tail, *split(prev))
    return state._replace(
        head=head,
        prev=prev,
        evicted_frames=state.frames - frames,
        evicted_windows=state.windows - windows,
    )
