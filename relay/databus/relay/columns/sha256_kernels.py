"""HMAC-SHA256 as a kernel: no Python object for a value that is hashed.

``hmac`` of the standard library costs microseconds of Python a call; this costs two to three
blocks of SHA-256.  Tests compare the two.
"""

from __future__ import annotations

import hashlib

import numpy as np

from databus.common.compiled.kernels import I64Array, U8Array, i64, jit

BLOCK_BYTES = 64
SCRATCH_WORDS = 64 + 8 + 8


def _primes(count: int) -> list[int]:
    found: list[int] = []
    number = 2
    while len(found) < count:
        if all(number % prime for prime in found):
            found.append(number)
        number += 1
    return found


def _root_bits(number: int, power: int) -> int:
    """The first 32 bits of the fraction of a root: the constants of SHA-256."""
    low, high = 0, number << 32
    while high - low > 1:
        middle = (low + high) // 2
        if middle**power <= number << 32 * power:
            low = middle
        else:
            high = middle
    return low & 0xFFFFFFFF


INITIAL = np.array([_root_bits(prime, 2) for prime in _primes(8)], dtype=np.int64)
ROUNDS = np.array([_root_bits(prime, 3) for prime in _primes(64)], dtype=np.int64)


@jit
def _turn(word: int, count: int) -> int:
    return (word >> count | word << (32 - count)) & 0xFFFFFFFF


@jit
def compress(state: I64Array, at: int, words: I64Array) -> None:
    """Take the block in ``words[:16]`` into ``state[at : at + 8]``; ``words`` has 64 numbers."""
    for i in range(16, 64):
        old, new = words[i - 15], words[i - 2]
        low = _turn(old, 7) ^ _turn(old, 18) ^ old >> 3
        high = _turn(new, 17) ^ _turn(new, 19) ^ new >> 10
        words[i] = (words[i - 16] + low + words[i - 7] + high) & 0xFFFFFFFF
    a, b, c, d = state[at], state[at + 1], state[at + 2], state[at + 3]
    e, f, g, h = state[at + 4], state[at + 5], state[at + 6], state[at + 7]
    for i in range(64):
        choice = (e & f) ^ ((e ^ 0xFFFFFFFF) & g)
        first = h + (_turn(e, 6) ^ _turn(e, 11) ^ _turn(e, 25)) + choice + ROUNDS[i] + words[i]
        majority = (a & b) ^ (a & c) ^ (b & c)
        second = (_turn(a, 2) ^ _turn(a, 13) ^ _turn(a, 22)) + majority
        h, g, f = g, f, e
        e = (d + first) & 0xFFFFFFFF
        d, c, b = c, b, a
        a = (first + second) & 0xFFFFFFFF
    state[at] = (state[at] + a) & 0xFFFFFFFF
    state[at + 1] = (state[at + 1] + b) & 0xFFFFFFFF
    state[at + 2] = (state[at + 2] + c) & 0xFFFFFFFF
    state[at + 3] = (state[at + 3] + d) & 0xFFFFFFFF
    state[at + 4] = (state[at + 4] + e) & 0xFFFFFFFF
    state[at + 5] = (state[at + 5] + f) & 0xFFFFFFFF
    state[at + 6] = (state[at + 6] + g) & 0xFFFFFFFF
    state[at + 7] = (state[at + 7] + h) & 0xFFFFFFFF


def keyed_states(key: bytes) -> I64Array:
    """SHA-256's states after HMAC's inner and after its outer first block, 8 numbers each."""
    if len(key) > BLOCK_BYTES:
        key = hashlib.sha256(key).digest()
    key = key.ljust(BLOCK_BYTES, b"\0")
    states = np.concatenate((INITIAL, INITIAL))
    for at, pad in ((0, 0x36), (8, 0x5C)):
        words = np.zeros(64, dtype=np.int64)
        words[:16] = np.frombuffer(bytes(byte ^ pad for byte in key), dtype=">u4")
        compress(states, at, words)
    return states


@jit
def put_hmac(
    states: I64Array, text: U8Array, start: int, stop: int, scratch: I64Array, out: U8Array, at: int
) -> int:
    """Write the HMAC of ``text[start:stop]`` as 64 hexadecimal digits; where they end.

    ``scratch`` has SCRATCH_WORDS numbers.
    """
    inner, outer = 64, 72
    for i in range(8):
        scratch[inner + i] = states[i]
        scratch[outer + i] = states[8 + i]
    bits = (stop - start + 64) * 8
    place = start
    ended = False
    while True:
        for i in range(16):
            word = i64(0)
            for _ in range(4):
                byte = i64(0)
                if place < stop:
                    byte = i64(text[place])
                elif not ended:
                    byte = i64(0x80)
                    ended = True
                place += 1
                word = word << 8 | byte
            scratch[i] = word
        # The length stands in the last eight bytes, if they are free.
        last = ended and place - stop >= 9
        if last:
            scratch[14] = bits >> 32
            scratch[15] = bits & 0xFFFFFFFF
        compress(scratch, inner, scratch)
        if last:
            break
    for i in range(8):
        scratch[i] = scratch[inner + i]
    scratch[8] = 0x80000000
    for i in range(9, 15):
        scratch[i] = 0
    scratch[15] = (64 + 32) * 8
    compress(scratch, outer, scratch)
    for i in range(8):
        word = scratch[outer + i]
        for nibble in range(8):
            digit = word >> (28 - 4 * nibble) & 15
            out[at] = digit + (48 if digit < 10 else 87)
            at += 1
    return at


def warm_up() -> None:
    """Compile the kernel, or load it from numba's cache."""
    text, out = np.zeros(1, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    put_hmac(keyed_states(b"key"), text, 0, 0, np.zeros(SCRATCH_WORDS, dtype=np.int64), out, 0)
