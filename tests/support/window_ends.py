"""Frames as the source gave them: the ring writes into each end of a window where the last was."""

from __future__ import annotations

from databus.common.frame.frame_format import Buffer, Op

_OP = 11
_CRC = slice(0, 4)
_STATED = slice(32, 48)


def as_source_gave(frame: Buffer) -> bytes:
    """A frame without what the ring has written into it, and its CRC."""
    data = bytearray(frame)
    if data[_OP] == Op.END_OF_WINDOW:
        data[_CRC] = bytes(4)
        data[_STATED] = bytes(16)
    return bytes(data)
