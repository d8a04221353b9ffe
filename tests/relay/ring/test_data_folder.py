"""Small documents beside the ring: damage is named, and earlier releases' are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from databus.common.errors import FormatError
from databus.relay.ring.data_folder import read_document, write_document


def test_no_flipped_bit_and_no_cut_of_a_document_passes(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    assert read_document(path) is None
    content = json.dumps({"v": 1, "tables": [{"source": "shop.orders", "since_scn": 71}]}).encode()
    write_document(path, content)
    assert read_document(path) == content
    whole = path.read_bytes()
    damaged = [whole[:size] for size in range(len(whole))]
    for at, byte in enumerate(whole):
        damaged += [whole[:at] + bytes([byte ^ 1 << bit]) + whole[at + 1 :] for bit in range(8)]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(FormatError, match=str(path)):
            read_document(path)


def test_a_document_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dumps.json"
    path.write_bytes(b'{"v": 1, "dumps": []}')
    assert read_document(path) == b'{"v": 1, "dumps": []}'
