"""The fingerprint of schemas against fastavro's."""

from __future__ import annotations

from fastavro.schema import fingerprint
from hypothesis import given
from hypothesis import strategies as st

from databus.common.schema.rabin_fingerprint import crc_64_avro


@given(st.text(max_size=60))
def test_any_text_has_the_fingerprint_that_fastavro_gives(text: str) -> None:
    # fastavro gives the bytes in little-endian order, as Java does.
    expected = int.from_bytes(bytes.fromhex(fingerprint(text, "CRC-64-AVRO")), "little")
    assert crc_64_avro(text.encode()) == expected


def test_the_examples_of_the_specification() -> None:
    assert crc_64_avro(b'"int"') == 0x7275D51A3F395C8F
    assert crc_64_avro(b'"null"') == 0x63DD24E7CC258F8A
