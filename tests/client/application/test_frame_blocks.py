"""Windows that lie whole in a block, against a walk over its frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from databus.client.application.frame_blocks import Block
from databus.common.checkpoint import Position
from databus.common.frame.frame_format import FIRST_CONTROL_OP, Op
from databus.common.frame.window_builder import heartbeat
from tests.support.live_relay import ORDERS, window


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 5), st.integers(0, 3))
def test_a_whole_window_is_one_of_rows_alone_up_to_its_end(
    sizes: list[int], left_out: int, cut_after: int
) -> None:
    """A size of 0 is a heartbeat; a filter may leave the end of a window out."""
    frames = []
    for scn, size in enumerate(sizes, start=1):
        if size == 0:
            frames.append(heartbeat(Position(scn), 0))
            continue
        data = window(scn, [(Op.INSERT, ORDERS, key) for key in range(size)])
        block = Block(data, bootstrap=False)
        ends = [*block.offsets[1:], len(data)]
        parts = [bytes(data[a:b]) for a, b in zip(block.offsets, ends, strict=True)]
        frames += parts[:-1] if scn == left_out else parts
    data = b"".join(frames[min(cut_after, len(frames) - 1) :])
    block = Block(data, bootstrap=False)
    for index in range(block.count):
        end = index
        while (
            end < block.count
            and block.ops[end] < FIRST_CONTROL_OP
            and block.scns[end] == block.scns[index]
        ):
            end += 1
        is_whole = (
            index < end < block.count
            and block.ops[end] == Op.END_OF_WINDOW
            and block.scns[end] == block.scns[index]
        )
        assert block.whole_window(index) == (end if is_whole else -1)
        for most_rows in range(5):
            assert block.whole_windows(index, most_rows) == _walked(block, index, most_rows)


def _walked(block: Block, index: int, most_rows: int) -> tuple[int, int]:
    """The whole windows from ``index`` on, one after the other."""
    row_count, window_count = 0, 0
    while index < block.count and (end := block.whole_window(index)) >= 0:
        row_count += end - index
        if window_count and row_count > most_rows:
            break
        index, window_count = end + 1, window_count + 1
    return index, window_count
