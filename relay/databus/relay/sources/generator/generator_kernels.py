"""The generator's loops: they compute which row an event changes, and pack its frame.

Every event is a function of its number and the stream's parameters.  So the stream can begin
anywhere, and the table's state at any point is known without streaming it.  The 64-bit
arithmetic wraps on purpose; uncompiled callers silence numpy's warning about it.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import kernels
from databus.common.compiled.kernels import U8Array, put_digits
from databus.common.compiled.xxh3 import xxh3_64
from databus.common.frame.header_layout import (
    HAS_AFTER,
    HEADER_BYTES,
    INSERT,
    UPDATE,
    WINDOW_END_BYTES,
    seal,
    seal_window_end,
)
from databus.relay.sources.avro_kernels import put_long

EOW_ROOM_BYTES = WINDOW_END_BYTES + 12
ROW_ROOM_BYTES = HEADER_BYTES + 10 + 32

_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)
_MIX_1 = _U64(0xBF58476D1CE4E5B9)
_MIX_2 = _U64(0x94D049BB133111EB)
_LETTER_BITS = _U64(0x0F0F0F0F0F0F0F0F)
_LETTER_BASE = _U64(0x6161616161616161)
_BYTE = _U64(0xFF)


@kernels.jit
def mix(seed: int, number: int) -> np.uint64:
    """Splitmix64: 64 well-mixed bits for each number."""
    z = _U64(seed) + _U64(number) * _GOLDEN
    z = (z ^ (z >> _U64(30))) * _MIX_1
    z = (z ^ (z >> _U64(27))) * _MIX_2
    return z ^ (z >> _U64(31))


@kernels.jit
def row_of_event(seed: int, event: int, keys: int, multiplier: int) -> int:
    """The id that event number ``event`` writes: each id once in every ``keys`` events."""
    shift = kernels.i64(mix(seed, event // keys) % _U64(keys))
    return (event % keys * multiplier + shift) % keys


@kernels.jit
def last_event_of_row(seed: int, row: int, stop_event: int, keys: int, inverse: int) -> int:
    """The last event before ``stop_event`` that wrote the id ``row``; -1 if none did."""
    turn = stop_event // keys
    while turn >= 0:
        shift = kernels.i64(mix(seed, turn) % _U64(keys))
        event = turn * keys + (row - shift + keys) % keys * inverse % keys
        if event < stop_event:
            return event
        turn -= 1
    return -1


@kernels.jit
def put_row(out: U8Array, at: int, seed: int, row: int, event: int, payload_bytes: int) -> int:
    """Write the Avro row (id, version, payload) that ``event`` gave ``row``; return its end."""
    at = put_long(out, at, row)
    at = put_long(out, at, event)
    at = put_long(out, at, payload_bytes)
    end = at + payload_bytes
    number = event * 4096
    while at < end:
        letters = (mix(seed + 1, number) & _LETTER_BITS) + _LETTER_BASE
        number += 1
        for _ in range(min(8, end - at)):
            out[at] = np.uint8(letters & _BYTE)
            letters >>= _U64(8)
            at += 1
    return end


@kernels.jit
def put_events(
    out: U8Array,
    first_event: int,
    stop_event: int,
    total_events: int,
    events_per_window: int,
    keys: int,
    multiplier: int,
    seed: int,
    payload_bytes: int,
    source: int,
    schema_fp: np.uint64,
    commit_us: int,
    start_us: int,
    us_per_million: int,
) -> tuple[int, int]:
    """Pack the events from ``first_event`` on, each window's end after its last event.

    It stops at ``stop_event`` or before an event that might not fit; ``total_events`` closes
    the last window early, 0 means endless.  ``commit_us`` of 0 takes each window's time from
    its first event: ``start_us`` + event * ``us_per_million`` / 1e6.
    Returns (number of the next event, bytes written).
    """
    at = 0
    event = first_event
    room = ROW_ROOM_BYTES + payload_bytes + EOW_ROOM_BYTES
    while event < stop_event and at + room <= len(out):
        window = event // events_per_window
        scn = window + 1
        seq = event - window * events_per_window
        moment = commit_us
        if moment == 0:
            moment = start_us + window * events_per_window * us_per_million // 1000000
        row = row_of_event(seed, event, keys, multiplier)
        key_start = at + HEADER_BYTES
        key_end = put_long(out, key_start, row)
        hashed = xxh3_64(out, key_start, key_end)
        end = put_row(out, key_end, seed, row, event, payload_bytes)
        op = INSERT if event < keys else UPDATE
        at = seal(
            out, at, end, op, HAS_AFTER, scn, seq, source, hashed, schema_fp, moment,
            key_end - key_start, 0, end - key_end, 0,
        )  # fmt: skip
        event += 1
        if event % events_per_window == 0 or event == total_events:
            txid_stop = put_digits(out, at + HEADER_BYTES, scn)
            at = seal_window_end(out, at, txid_stop, scn, seq + 1, moment, seq + 1)
    return event, at


def multiplier_and_inverse(seed: int, keys: int) -> tuple[int, int]:
    """A number without a common divisor with ``keys``, and its inverse modulo ``keys``."""
    if keys == 1:
        return 1, 1
    with np.errstate(over="ignore"):
        candidate = int(mix(seed, 2**32)) % keys
    while np.gcd(candidate, keys) != 1:
        candidate = (candidate + 1) % keys
    return candidate, pow(candidate, -1, keys)


def warm_up() -> None:
    """Compile the loops, or load them from the cache."""
    out = np.empty(64, dtype=np.uint8)
    multiplier_and_inverse(1, 2)
    last_event_of_row(1, 0, 0, 1, 1)
    put_events(out, 0, 0, 0, 1, 1, 1, 1, 0, 1, _U64(0), 0, 0, 0)
