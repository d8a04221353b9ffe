"""Reads that followers share: the same bytes as reads of their own, whatever happens between."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from databus.common.checkpoint import ORIGIN
from databus.common.errors import ReaderOvertaken
from databus.relay.ring.ring import Ring
from databus.relay.serving.shared_reads import MAX_BLOCKS, SharedReads
from tests.support.windows import endless_windows, make_window

RING_BYTES = 16384


def test_readers_at_one_position_cost_one_read_until_the_next_commit(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as ring:
        reads, first, second = SharedReads(), make_window(1, [50]), make_window(2, [60])
        writer.append(first)
        start = ring.find(ORIGIN)
        found = [reads.read(ring, start, 4096) for _ in range(40)]
        assert {bytes(block) for block, _ in found} == {first}
        assert reads.read_count == 1
        tail = found[0][1]
        for _ in range(3):
            assert (len(reads.read(ring, tail, 4096)[0]), reads.read(ring, tail, 4096)[1]) == (
                0,
                tail,
            )
        assert reads.read_count == 2
        writer.append(second)
        assert bytes(reads.read(ring, tail, 4096)[0]) == second
        assert bytes(reads.read(ring, start, 4096)[0]) == first + second


def test_a_block_is_scanned_once_for_all_readers_that_get_it(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as ring:
        reads = SharedReads()
        writer.append(make_window(1, [50, 60]))
        at = ring.find(ORIGIN)
        for scn in range(2, 3 * MAX_BLOCKS):
            block, after = reads.read(ring, at, 4096)
            facts = reads.facts(block)
            assert reads.facts(reads.read(ring, at, 4096)[0]) is facts
            assert (facts.last, facts.row_count) == (ring.snapshot().max, 2)
            assert len(facts.columns) == 3
            assert facts.commit_us == ring.snapshot().max_commit_us
            writer.append(make_window(scn, [50, 60]))
            at = after


def test_what_was_evicted_is_not_given_from_memory(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as ring:
        reads = SharedReads()
        writer.append(make_window(1, [50]))
        start = ring.find(ORIGIN)
        reads.read(ring, start, 4096)
        for scn in range(2, 20):
            writer.append(make_window(scn, [2000]))
        with pytest.raises(ReaderOvertaken):
            reads.read(ring, start, 4096)


def test_a_replaced_ring_is_followed(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES, clock="c") as writer:
        writer.append(make_window(1, [50]))
        with Ring.open_reader(tmp_path) as ring:
            reads, start = SharedReads(), ring.find(ORIGIN)
            reads.read(ring, start, 4096)
            writer.resize(RING_BYTES)
            with pytest.raises(ReaderOvertaken):
                reads.read(ring, start, 4096)


def test_any_mix_of_readers_and_commits_gets_what_reads_of_their_own_get(tmp_path: Path) -> None:
    rng = random.Random(3)
    windows = endless_windows(9, most_bytes=500)
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as ring:
        reads, ring_positions = SharedReads(), [ring.find(ORIGIN)] * 5
        for _ in range(600):
            if rng.random() < 0.2:
                writer.append(next(windows))
            index = rng.randrange(5)
            size = rng.choice((1, 500, 4096))
            try:
                wanted = ring.read(ring_positions[index], size)
            except ReaderOvertaken:
                with pytest.raises(ReaderOvertaken):
                    reads.read(ring, ring_positions[index], size)
                ring_positions[index] = ring.find(ring.snapshot().prev)
                continue
            assert reads.read(ring, ring_positions[index], size) == wanted
            ring_positions[index] = wanted[1]
            assert len(reads._answers) <= MAX_BLOCKS
        assert reads.read_count < 600
