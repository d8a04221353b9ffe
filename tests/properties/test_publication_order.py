"""The ring's order of stores, against every reordering that ARM and x86 allow.

docs/decisions/0019-publication-order.md is the argument; here are its programs.  That the
writer really stores in this order is recorded from it, fence by fence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_file import RingFile
from databus.relay.ring.ring_format import (
    CONTROL_OFFSETS,
    DATA_OFFSET,
    LIVE_OFFSET,
    SLOT,
    SLOT_OFFSETS,
)
from tests.support.weak_memory import ARM, FENCE, X86, Model, Op, load, outcomes, store
from tests.support.windows import make_window

# ---- a snapshot is whole ----

# A state is one number, written twice, since a slot is more than one word.
SLOTS = {"epoch": 0, "slot0 a": 0, "slot0 b": 0, "slot1 a": -1, "slot1 b": -1}
PUBLISHING = [
    store("slot1 a", 1), store("slot1 b", 1), FENCE, store("epoch", 1), FENCE,
    store("slot0 a", 2), store("slot0 b", 2), FENCE, store("epoch", 2), FENCE,
]  # fmt: skip
# Which slot counts is known from the epoch; here both are loaded.
SNAPSHOT = [
    load("epoch", "epoch"), FENCE,
    *(load(f"slot{n} {word}", f"slot{n} {word}") for n in (0, 1) for word in "ab"), FENCE,
    load("epoch", "again"),
]  # fmt: skip


def torn(registers: dict[str, int]) -> bool:
    """Whether a reader takes something for a state that is none, or not that of its epoch."""
    epoch, slot = registers["epoch"], registers["epoch"] & 1
    words = {registers[f"slot{slot} a"], registers[f"slot{slot} b"]}
    return registers["again"] == epoch and words != {epoch}


# ---- what is read under it is right ----

# A snapshot that is whole is one word; the loads and stores around it are those of its epoch.
# State 0: the frame, two words of 0, lies there.  State 1: it is evicted.  State 2: the frame
# in its place, two words of 2, is shown.
RING = {"state": 0, "data a": 0, "data b": 0}
OVERWRITING = [
    store("state", 1), FENCE,
    store("data a", 2), store("data b", 2), FENCE,
    store("state", 2),
]  # fmt: skip
READING = [
    load("state", "before"), FENCE,
    load("data a", "a"), load("data b", "b"), FENCE,
    load("state", "after"),
]  # fmt: skip


def wrong(registers: dict[str, int]) -> bool:
    """Whether a reader takes bytes for the frame of its state that are another's."""
    before, after = registers["before"], registers["after"]
    if before == 1 or (before == 0 and after != 0):
        return False  # nothing to read, or overtaken and notified
    return (registers["a"], registers["b"]) != (before, before)


CASES = [(SLOTS, PUBLISHING, SNAPSHOT, torn), (RING, OVERWRITING, READING, wrong)]
Fault = Callable[[dict[str, int]], bool]
each_protocol = pytest.mark.parametrize(
    ("memory", "writer", "reader", "fault"), CASES, ids=["snapshot", "read"]
)


def without(program: list[Op], number: int) -> list[Op]:
    """The program without its fence of this number."""
    at = [n for n, op in enumerate(program) if op == FENCE][number]
    return program[:at] + program[at + 1 :]


@each_protocol
@pytest.mark.parametrize("model", [ARM, X86], ids=lambda model: model.name)
def test_no_reader_ever_takes_a_wrong_byte_for_right(
    model: Model, memory: dict[str, int], writer: list[Op], reader: list[Op], fault: Fault
) -> None:
    found = list(outcomes(model, memory, writer, reader))
    assert not any(map(fault, found))
    assert len(found) > 5, "readers come before, between and after the stores"


@each_protocol
def test_on_arm_every_fence_is_needed_but_the_one_at_the_end(
    memory: dict[str, int], writer: list[Op], reader: list[Op], fault: Fault
) -> None:
    for program in (writer, reader):
        for number in range(program.count(FENCE)):
            less = without(program, number)
            both = (less, reader) if program is writer else (writer, less)
            is_last = program is writer and program[-1] == FENCE and less == program[:-1]
            assert any(map(fault, outcomes(ARM, memory, *both))) is not is_last


@each_protocol
def test_x86_alone_would_need_no_fence_for_ordinary_stores(
    memory: dict[str, int], writer: list[Op], reader: list[Op], fault: Fault
) -> None:
    bare = [op for op in writer if op != FENCE], [op for op in reader if op != FENCE]
    assert not any(map(fault, outcomes(X86, memory, *bare)))
    assert any(map(fault, outcomes(ARM, memory, *bare)))


# ---- what is sent as it lies ----

# The same ring under a sender (docs/decisions/0018): it walks the frame and copies its position
# into a SPAN, looks whether the head has passed, lets the kernel copy the bytes to the socket, and
# looks again.  The reader has whatever went out, also before a connection that was reset.
WALK = [load("state", "before"), FENCE, load("data a", "last")]
LOOK_BEFORE = [FENCE, load("state", "started")]
CALL = [FENCE, load("data a", "a"), load("data b", "b")]
LOOK_AFTER = [FENCE, load("state", "after")]
SENDING = [*WALK, *LOOK_BEFORE, *CALL, *LOOK_AFTER]


def is_sent(registers: dict[str, int]) -> bool:
    """Whether there was a frame, and nothing forbade the call."""
    before = registers["before"]
    return before != 1 and registers.get("started", before) == before


def spoiled(registers: dict[str, int]) -> bool:
    """Whether bytes that are not the frame's went out."""
    before = registers["before"]
    return is_sent(registers) and (registers["a"], registers["b"]) != (before, before)


def taken_for_data(registers: dict[str, int]) -> bool:
    """Whether a reader of spans takes such bytes: a whole frame, not after the SPAN's position."""
    is_whole = registers["a"] == registers["b"]
    return spoiled(registers) and is_whole and registers["a"] <= registers["last"]


def not_cut_off(registers: dict[str, int]) -> bool:
    """Whether the sender continues after such bytes."""
    before = registers["before"]
    return spoiled(registers) and registers.get("after", before) == before


def refused(registers: dict[str, int]) -> bool:
    """Whether a reader is sent the right bytes and cannot take them, since the SPAN ends before."""
    right = is_sent(registers) and not spoiled(registers)
    return right and registers["last"] < registers["before"]


def sends(model: Model, sender: list[Op]) -> list[dict[str, int]]:
    return list(outcomes(model, RING, OVERWRITING, sender))


@pytest.mark.parametrize("model", [ARM, X86], ids=lambda model: model.name)
def test_what_was_overwritten_while_it_was_sent_is_cut_off_and_never_taken_for_data(
    model: Model,
) -> None:
    found = sends(model, SENDING)
    assert any(map(spoiled, found)), "the writer does come by during the call"
    assert not any(map(taken_for_data, found))
    assert not any(map(not_cut_off, found))
    assert not any(map(refused, found))


@pytest.mark.parametrize("model", [ARM, X86], ids=lambda model: model.name)
def test_a_sender_needs_both_looks_at_the_head(model: Model) -> None:
    without_second = sends(model, [*WALK, *LOOK_BEFORE, *CALL])
    assert any(map(not_cut_off, without_second))
    assert not any(map(taken_for_data, without_second)), "the SPAN is enough for its readers"
    without_first = sends(model, [*WALK, *CALL, *LOOK_AFTER])
    assert any(map(taken_for_data, without_first)), "the SPAN itself may name the next lap"


def test_on_arm_a_sender_needs_every_fence_but_the_one_before_the_call() -> None:
    needed = []
    for number in range(SENDING.count(FENCE)):
        found = sends(ARM, without(SENDING, number))
        faults = (taken_for_data, not_cut_off, refused)
        needed.append(any(fault(registers) for fault in faults for registers in found))
    # Bytes that are loaded before the look at the head are older, and so still the frame's.
    assert needed == [True, True, False, True]


# ---- what the writer really does ----

REGIONS = {
    "epoch": range(LIVE_OFFSET, LIVE_OFFSET + 8),
    "slot0": range(SLOT_OFFSETS[0], SLOT_OFFSETS[0] + SLOT.size),
    "slot1": range(SLOT_OFFSETS[1], SLOT_OFFSETS[1] + SLOT.size),
}


def regions(old: bytes, new: bytes) -> frozenset[str]:
    """Where two images of the file differ, the control copies left out."""
    found = set()
    for name, region in REGIONS.items():
        if old[region.start : region.stop] != new[region.start : region.stop]:
            found.add(name)
    if old[DATA_OFFSET:] != new[DATA_OFFSET:]:
        found.add("data")
    return frozenset(found)


def test_the_writer_stores_in_this_order_fence_by_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Ring.create(tmp_path, 8192, clock="c")
    scn = 0
    while not writer.state.evicted_windows:
        scn += 1
        writer.append(make_window(scn, [400]))
    steps: list[frozenset[str]] = []
    image = (tmp_path / "ring").read_bytes()
    fence = RingFile.fence

    def recorded(file: RingFile) -> None:
        nonlocal image
        now = (tmp_path / "ring").read_bytes()
        steps.append(regions(image, now))
        image = now
        fence(file)

    monkeypatch.setattr(RingFile, "fence", recorded)
    shapes = set()
    for later in range(scn + 1, scn + 40):
        steps.clear()
        evicted = writer.state.evicted_windows
        writer.append(make_window(later, [400]))
        written = [step for step in steps if step]
        shapes.add((writer.state.evicted_windows > evicted, tuple(len(s) for s in written)))
        for step, following in itertools.pairwise(written):
            # A slot is whole before the epoch names it, and nothing is overwritten before.
            assert step != {"epoch"} or "epoch" not in following
        epochs = [step for step in written if "epoch" in step]
        assert all(step == {"epoch"} for step in epochs), written
        data = [at for at, step in enumerate(written) if "data" in step]
        assert len(data) == 1, written
        first_epoch = next(at for at, step in enumerate(written) if step == {"epoch"})
        if writer.state.evicted_windows > evicted:
            assert first_epoch < data[0], "the head is published before it is overwritten"
        assert written[-1] == {"epoch"}
        assert data[0] < len(written) - 1
    writer.close()
    assert {evicting for evicting, _ in shapes} == {True, False}


def test_everything_that_is_shared_lies_on_words_of_its_own() -> None:
    starts = [0, *CONTROL_OFFSETS, LIVE_OFFSET, *SLOT_OFFSETS, DATA_OFFSET]
    assert all(start % 8 == 0 for start in starts)
    cache_lines = [region.start // 64 for region in REGIONS.values()]
    assert len(set(cache_lines)) == len(cache_lines)
