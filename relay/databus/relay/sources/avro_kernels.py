"""Avro's long and bytes, written by compiled code: what the packers of rows share.

Fixed-width values and those of one database's protocol are the business of its own kernels.
"""

from __future__ import annotations

import numpy as np

from databus.common import kernels
from databus.common.kernels import U8Array

_U64 = np.uint64


@kernels.jit
def put_long(out: U8Array, at: int, value: int) -> int:
    """Write an int or long; where it ends."""
    rest = _U64((value << 1) ^ (value >> 63))
    while rest >= _U64(0x80):
        out[at] = np.uint8((rest & _U64(0x7F)) | _U64(0x80))
        rest >>= _U64(7)
        at += 1
    out[at] = np.uint8(rest)
    return at + 1


@kernels.jit
def put_bytes(buf: U8Array, start: int, length: int, out: U8Array, at: int) -> int:
    """Write ``buf[start:start + length]`` as bytes or string; where it ends."""
    at = put_long(out, at, length)
    if length >= 16:
        kernels.copy(out, at, buf, start, length)
    else:
        for offset in range(length):
            out[at + offset] = buf[start + offset]
    return at + length
