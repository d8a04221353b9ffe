"""XXH3 (64 bits, seed 0) as a kernel: the key hash for loops that hold no Python objects.

Without numba the xxhash package does the same; the tests compare the two over all
length classes.  Source: the xxHash specification, chapter "XXH3 algorithm overview".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from databus.common.compiled.kernels import COMPILED, U8Array, jit, jit_uncounted

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
# The secret is read at every byte offset: one word for each of them.
_WORDS = np.array(
    [int.from_bytes(_SECRET[at : at + 8], "little") for at in range(len(_SECRET) - 7)],
    dtype=np.uint64,
)
_PRIME32_1 = np.uint64(0x9E3779B1)
_PRIME64_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME64_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME64_3 = np.uint64(0x165667B19E3779F9)
_PRIME_MX1 = np.uint64(0x165667919E3779F9)
_PRIME_MX2 = np.uint64(0x9FB21C651E98DF25)
_ACCUMULATORS = np.array(
    [
        0xC2B2AE3D,
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x85EBCA77,
        0x27D4EB2F165667C5,
        0x9E3779B1,
    ],
    dtype=np.uint64,
)
_LOW = np.uint64(0xFFFFFFFF)
_8, _16, _24, _32 = (np.uint64(n) for n in (8, 16, 24, 32))
_28, _29, _33, _35, _37, _47 = (np.uint64(n) for n in (28, 29, 33, 35, 37, 47))
_15, _40, _49, _56 = (np.uint64(n) for n in (15, 40, 49, 56))
_STRIPE_BYTES, _STRIPES, _LAST_SECRET = 64, 16, 128


@jit_uncounted
def _u64(buf: U8Array, at: int) -> np.uint64:
    return (
        np.uint64(buf[at])
        | np.uint64(buf[at + 1]) << _8
        | np.uint64(buf[at + 2]) << _16
        | np.uint64(buf[at + 3]) << _24
        | np.uint64(buf[at + 4]) << _32
        | np.uint64(buf[at + 5]) << _40
        | np.uint64(buf[at + 6]) << np.uint64(48)
        | np.uint64(buf[at + 7]) << _56
    )


@jit_uncounted
def _u32(buf: U8Array, at: int) -> np.uint64:
    return (
        np.uint64(buf[at])
        | np.uint64(buf[at + 1]) << _8
        | np.uint64(buf[at + 2]) << _16
        | np.uint64(buf[at + 3]) << _24
    )


@jit_uncounted
def _swapped(value: np.uint64) -> np.uint64:
    value = (value & np.uint64(0x00FF00FF00FF00FF)) << _8 | (value >> _8) & np.uint64(
        0x00FF00FF00FF00FF
    )
    value = (value & np.uint64(0x0000FFFF0000FFFF)) << _16 | (value >> _16) & np.uint64(
        0x0000FFFF0000FFFF
    )
    return value << _32 | value >> _32


@jit_uncounted
def _folded(left: np.uint64, right: np.uint64) -> np.uint64:
    """The low and the high half of the 128-bit product, xored."""
    low_low = (left & _LOW) * (right & _LOW)
    high_low = (left >> _32) * (right & _LOW)
    low_high = (left & _LOW) * (right >> _32)
    high_high = (left >> _32) * (right >> _32)
    cross = (low_low >> _32) + (high_low & _LOW) + low_high
    upper = (high_low >> _32) + (cross >> _32) + high_high
    lower = cross << _32 | low_low & _LOW
    return upper ^ lower


@jit_uncounted
def _avalanche(value: np.uint64) -> np.uint64:
    value ^= value >> _37
    value *= _PRIME_MX1
    return value ^ value >> _32


@jit_uncounted
def _avalanche_xxh64(value: np.uint64) -> np.uint64:
    value ^= value >> _33
    value *= _PRIME64_2
    value ^= value >> _29
    value *= _PRIME64_3
    return value ^ value >> _32


@jit_uncounted
def _mix(buf: U8Array, at: int, secret: int) -> np.uint64:
    return _folded(_u64(buf, at) ^ _WORDS[secret], _u64(buf, at + 8) ^ _WORDS[secret + 8])


@jit_uncounted
def _short(buf: U8Array, start: int, length: int) -> np.uint64:
    """Up to 16 bytes."""
    stop = start + length
    size = np.uint64(length)
    if length > 8:
        low = _u64(buf, start) ^ _WORDS[24] ^ _WORDS[32]
        high = _u64(buf, stop - 8) ^ _WORDS[40] ^ _WORDS[48]
        return _avalanche(size + _swapped(low) + high + _folded(low, high))
    if length >= 4:
        value = _u32(buf, stop - 4) + (_u32(buf, start) << _32)
        value ^= _WORDS[8] ^ _WORDS[16]
        value ^= (value << _49 | value >> _15) ^ (value << _24 | value >> _40)
        value *= _PRIME_MX2
        value ^= (value >> _35) + size
        value *= _PRIME_MX2
        return np.uint64(value ^ value >> _28)
    if length:
        value = (
            np.uint64(buf[start]) << _16
            | np.uint64(buf[start + (length >> 1)]) << _24
            | np.uint64(buf[stop - 1])
            | size << _8
        )
        return _avalanche_xxh64(value ^ (_WORDS[0] ^ _WORDS[4]) & _LOW)
    return _avalanche_xxh64(_WORDS[56] ^ _WORDS[64])


@jit_uncounted
def _middle(buf: U8Array, start: int, length: int) -> np.uint64:
    """17 to 240 bytes."""
    stop = start + length
    total = np.uint64(length) * _PRIME64_1
    if length <= 128:
        for step in range((length - 1) // 32, -1, -1):
            total += _mix(buf, start + 16 * step, 32 * step)
            total += _mix(buf, stop - 16 * step - 16, 32 * step + 16)
        return _avalanche(total)
    for step in range(8):
        total += _mix(buf, start + 16 * step, 16 * step)
    total = _avalanche(total)
    for step in range(8, length // 16):
        total += _mix(buf, start + 16 * step, 16 * (step - 8) + 3)
    total += _mix(buf, stop - 16, 119)
    return _avalanche(total)


@jit_uncounted
def _accumulate(sums: npt.NDArray[np.uint64], buf: U8Array, at: int, secret: int) -> None:
    for lane in range(8):
        value = _u64(buf, at + 8 * lane)
        keyed = value ^ _WORDS[secret + 8 * lane]
        sums[lane ^ 1] += value
        sums[lane] += (keyed & _LOW) * (keyed >> _32)


@jit
def _long(buf: U8Array, start: int, length: int) -> np.uint64:
    """More than 240 bytes."""
    sums = _ACCUMULATORS.copy()
    stripes = (length - 1) // _STRIPE_BYTES
    for stripe in range(stripes):
        index = stripe % _STRIPES
        _accumulate(sums, buf, start + stripe * _STRIPE_BYTES, 8 * index)
        if index == _STRIPES - 1:
            for lane in range(8):
                sums[lane] ^= sums[lane] >> _47
                sums[lane] ^= _WORDS[_LAST_SECRET + 8 * lane]
                sums[lane] *= _PRIME32_1
    _accumulate(sums, buf, start + length - _STRIPE_BYTES, _LAST_SECRET - 7)
    total = np.uint64(length) * _PRIME64_1
    for pair in range(4):
        total += _folded(
            sums[2 * pair] ^ _WORDS[11 + 16 * pair],
            sums[2 * pair + 1] ^ _WORDS[11 + 16 * pair + 8],
        )
    return _avalanche(total)


@jit_uncounted
def _xxh3_64(buf: U8Array, start: int, stop: int) -> np.uint64:
    length = stop - start
    if length <= 16:
        return _short(buf, start, length)
    if length <= 240:
        return _middle(buf, start, length)
    return _long(buf, start, length)


if COMPILED:
    xxh3_64 = _xxh3_64
else:

    def xxh3_64(buf: U8Array, start: int, stop: int) -> np.uint64:
        """XXH3 of ``buf[start:stop]`` as an unsigned 64-bit number."""
        return np.uint64(xxhash.xxh3_64_intdigest(buf[start:stop].tobytes()))


@jit
def xxh3_64_of_each(
    buf: U8Array, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """XXH3 of ``buf[starts[i]:stops[i]]`` for each i."""
    out = np.empty(len(starts), dtype=np.uint64)
    for index in range(len(starts)):
        out[index] = xxh3_64(buf, starts[index], stops[index])
    return out
