"""CRC-32, the checksum of binlog events, compiled."""

from __future__ import annotations

import numpy as np

from databus.common.kernels import I64Array, U8Array, i64, jit, load_u32


def _crc32_tables() -> I64Array:
    """Slicing-by-8 tables of CRC-32 (reflected 0xEDB88320), the binlog's checksum."""
    tables = np.zeros((8, 256), dtype=np.int64)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
        tables[0, byte] = crc
    for slice_ in range(1, 8):
        previous = tables[slice_ - 1]
        tables[slice_] = tables[0][previous & 0xFF] ^ (previous >> 8)
    return tables


_CRC32 = _crc32_tables()


@jit
def crc32(buf: U8Array, start: int, stop: int) -> int:
    """CRC-32 of ``buf[start:stop]``, eight bytes a step."""
    tables = _CRC32
    crc = i64(0xFFFFFFFF)
    at = start
    while at + 8 <= stop:
        low = crc ^ load_u32(buf, at)
        crc = (
            tables[7, low & 0xFF]
            ^ tables[6, (low >> 8) & 0xFF]
            ^ tables[5, (low >> 16) & 0xFF]
            ^ tables[4, (low >> 24) & 0xFF]
            ^ tables[3, buf[at + 4]]
            ^ tables[2, buf[at + 5]]
            ^ tables[1, buf[at + 6]]
            ^ tables[0, buf[at + 7]]
        )
        at += 8
    while at < stop:
        crc = tables[0, (crc ^ i64(buf[at])) & 0xFF] ^ (crc >> 8)
        at += 1
    return crc ^ 0xFFFFFFFF
