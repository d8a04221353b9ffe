"""XXH3-64 of short inputs, for compiled code: the key's hash in a frame's header.

The algorithm is that of the xxHash specification with seed 0, up to 128 bytes.  Its 64-bit
arithmetic wraps on purpose.
"""

from __future__ import annotations

import numpy as np

from databus.common import kernels
from databus.common.kernels import U8Array

MAX_KEY_BYTES = 128
"""Longer keys are hashed by the xxhash package."""

_U64 = np.uint64
_LOW = _U64(0xFFFFFFFF)
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    ),
    dtype="<u8",
).copy()
_PRIME_64_1 = _U64(0x9E3779B185EBCA87)
_PRIME_64_2 = _U64(0xC2B2AE3D27D4EB4F)
_PRIME_64_3 = _U64(0x165667B19E3779F9)
_PRIME_MX1 = _U64(0x165667919E3779F9)
_PRIME_MX2 = _U64(0x9FB21C651E98DF25)


@kernels.jit
def xxh3_64(buf: U8Array, at: int, size: int) -> np.uint64:
    """The hash of ``buf[at:at + size]``, 1 to 128 bytes."""
    if size <= 3:
        combined = (
            _U64(buf[at]) << _U64(16)
            | _U64(buf[at + (size >> 1)]) << _U64(24)
            | _U64(buf[at + size - 1])
            | _U64(size) << _U64(8)
        )
        flip = (_SECRET[0] & _LOW) ^ (_SECRET[0] >> _U64(32))
        short = combined ^ flip
        short = (short ^ (short >> _U64(33))) * _PRIME_64_2
        short = (short ^ (short >> _U64(29))) * _PRIME_64_3
        mixed: np.uint64 = short ^ (short >> _U64(32))
        return mixed
    if size <= 8:
        first = _U64(kernels.load_u32(buf, at))
        last = _U64(kernels.load_u32(buf, at + size - 4))
        h = (last + (first << _U64(32))) ^ (_SECRET[1] ^ _SECRET[2])
        h ^= (h << _U64(49) | h >> _U64(15)) ^ (h << _U64(24) | h >> _U64(40))
        h *= _PRIME_MX2
        h ^= (h >> _U64(35)) + _U64(size)
        h *= _PRIME_MX2
        mixed = h ^ (h >> _U64(28))
        return mixed
    if size <= 16:
        low = _word(buf, at) ^ (_SECRET[3] ^ _SECRET[4])
        high = _word(buf, at + size - 8) ^ (_SECRET[5] ^ _SECRET[6])
        return _avalanche(_U64(size) + _swapped(low) + high + _folded(low, high))
    total = _U64(size) * _PRIME_64_1
    for pair in range((size - 1) // 32 + 1):
        total += _mixed(buf, at + 16 * pair, 4 * pair)
        total += _mixed(buf, at + size - 16 * (pair + 1), 4 * pair + 2)
    return _avalanche(total)


@kernels.jit
def _word(buf: U8Array, at: int) -> np.uint64:
    return _U64(kernels.load_u32(buf, at)) | _U64(kernels.load_u32(buf, at + 4)) << _U64(32)


@kernels.jit
def _mixed(buf: U8Array, at: int, secret: int) -> np.uint64:
    return _folded(_word(buf, at) ^ _SECRET[secret], _word(buf, at + 8) ^ _SECRET[secret + 1])


@kernels.jit
def _folded(left: np.uint64, right: np.uint64) -> np.uint64:
    """The 128-bit product, its two halves xored."""
    shift = _U64(32)
    low_low = (left & _LOW) * (right & _LOW)
    high_low = (left >> shift) * (right & _LOW)
    low_high = (left & _LOW) * (right >> shift)
    high_high = (left >> shift) * (right >> shift)
    cross = (low_low >> shift) + (high_low & _LOW) + low_high
    upper = (high_low >> shift) + (cross >> shift) + high_high
    return upper ^ (cross << shift | low_low & _LOW)


@kernels.jit
def _swapped(value: np.uint64) -> np.uint64:
    """The bytes in the other order."""
    swapped = _U64(0)
    for _ in range(8):
        swapped = swapped << _U64(8) | value & _U64(0xFF)
        value >>= _U64(8)
    return swapped


@kernels.jit
def _avalanche(value: np.uint64) -> np.uint64:
    value ^= value >> _U64(37)
    value *= _PRIME_MX1
    return value ^ (value >> _U64(32))
