"""Avro's long and bytes, written by compiled code: what the packers of rows share.

Fixed-width values and those of one database's protocol are the business of its own kernels.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import kernels
from databus.common.compiled.kernels import U8Array

_U64 = np.uint64
_LEAD = 0xED


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


@kernels.jit_uncounted
def has_surrogate(buf: U8Array, start: int, length: int) -> bool:
    """Whether there is half a pair of UTF-16 in what is UTF-8 otherwise: then it is no text."""
    begin = _U64(start)
    leads = np.uint8(0)
    for offset in range(_U64(length)):
        # An index without a sign, so that it is done for many bytes at a time.
        leads |= np.uint8(buf[begin + _U64(offset)] == _LEAD)
    if leads == 0:
        return False
    for place in range(start, start + length - 1):
        if buf[place] == _LEAD and buf[place + 1] >= 0xA0:
            return True
    return False
