"""Which frames of the blocks that have arrived are whole windows of rows: pure, for batches."""

from __future__ import annotations

from collections.abc import Iterable

from databus.client.application.frame_blocks import Block

Ahead = Iterable[tuple[Block, int]]
"""Blocks with frames to deliver, each with the index of the first such frame."""
Piece = tuple[Block, int, int]
"""A block, and the indices of the first of some frames in it and of the one after the last."""


def whole_pieces(ahead: Ahead, most_rows: int) -> tuple[list[Piece], int, int]:
    """The next windows of which every frame has arrived, and how many rows and windows they are.

    They have ``most_rows`` rows at most, unless the first one alone has more.  All their frames
    are rows, but for their ends.
    """
    pieces: list[Piece] = []
    begun: list[Piece] = []  # of a window whose end lies in a later block
    row_count = begun_rows = window_count = scn = 0
    for block, index in ahead:
        if block.bootstrap:
            break
        if begun:
            stop, has_end = block.window_part(index, scn)
            begun_rows += stop - index - has_end
            if (not has_end and stop < block.count) or (
                row_count and row_count + begun_rows > most_rows
            ):
                break
            begun.append((block, index, stop))
            if not has_end:
                continue
            pieces += begun
            begun = []
            row_count += begun_rows
            window_count += 1
            if stop == block.count:
                continue
            index = stop
        if row_count >= most_rows:
            break
        stop, count = block.whole_windows(index, most_rows - row_count)
        rows = stop - index - count
        if row_count + rows > most_rows and row_count:
            break
        if count:
            pieces.append((block, index, stop))
            row_count += rows
            window_count += count
        if stop < block.count:
            scn = int(block.scn_column[stop])
            end, has_end = block.window_part(stop, scn)
            if has_end or end < block.count:
                break
            begun = [(block, stop, end)]
            begun_rows = end - stop
    return pieces, row_count, window_count


def awaits_rest(ahead: Ahead) -> bool:
    """Whether only rows of a single window have arrived, and not its end."""
    scn = -1
    for block, index in ahead:
        scn = int(block.scn_column[index]) if scn < 0 else scn
        stop, has_end = block.window_part(index, scn)
        if block.bootstrap or has_end or stop < block.count:
            return False
    return scn >= 0
