"""CRC-32, the checksum of binlog events, compiled."""

from __future__ import annotations

from databus.common.compiled.kernels import U8Array, crc_by_tables, crc_tables, i64, jit_uncounted

_TABLES = crc_tables(0xEDB88320)


@jit_uncounted
def crc32(buf: U8Array, start: int, stop: int) -> int:
    """CRC-32 of ``buf[start:stop]``."""
    return crc_by_tables(_TABLES, buf, start, stop, i64(0xFFFFFFFF)) ^ 0xFFFFFFFF
