"""CRC-64-AVRO, the fingerprint of schemas.

fastavro has it too, and makes its table again for each schema, which took most of the start of a
process that knows 10,000 tables.  It is no kernel: to load the first kernel takes a second, as
long as 6,000 schemas here.  Source: the Avro specification, "Schema Fingerprints".
"""

from __future__ import annotations

_EMPTY = 0xC15D213AA4D7A795


def _table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = (crc >> 1) ^ (_EMPTY if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _table()


def crc_64_avro(data: bytes) -> int:
    """CRC-64-AVRO of ``data``, 0.2 us a byte."""
    crc, table = _EMPTY, _TABLE
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc
