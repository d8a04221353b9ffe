"""The frame: what is packed is read back, and nothing else is ever taken for a frame."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.checkpoint import Position
from databus.common.compiled import kernels
from databus.common.errors import FormatError
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Flag, FrameSplitter, Op
from databus.common.frame.window_builder import WindowBuilder, heartbeat

GOLDEN = Path(__file__).parents[2] / "golden" / "v1" / "frames.bin"
SPECIFICATION = Path(frame_format.__file__).with_name("FORMAT.md")

parts = st.binary(max_size=40)
frames = st.builds(
    frame_format.pack_frame,
    op=st.sampled_from([Op.INSERT, Op.UPDATE, Op.DELETE, Op.READ]),
    scn=st.integers(0, 2**64 - 1),
    seq=st.integers(0, 2**32 - 1),
    source=st.integers(1, 2**32 - 1),
    schema_fp=st.integers(0, 2**64 - 1),
    commit_us=st.integers(-(2**63), 2**63 - 1),
    key=parts,
    before=st.none() | parts,
    after=st.none() | parts,
    absent=parts,
)


def golden_window() -> bytes:
    window = WindowBuilder(812, 1_600_000_000_000_000)
    users, shop = frame_format.source_id("shop.users"), frame_format.source_id("shop.orders")
    window.event(Op.INSERT, users, 0xA1, b"\x02", after=b"\x02\x02a")
    window.event(Op.UPDATE, users, 0xA1, b"\x02", before=b"\x02\x02a", after=b"\x02\x02b")
    window.event(Op.DELETE, shop, 0xB2, b"\x04", before=b"")
    window.event(Op.UPDATE, shop, 0xB2, b"\x06", after=b"\x06\x00", absent=b"\x02")
    return window.end("0-1-812") + heartbeat(Position(900, 0), 1_600_000_001_000_000)


def scans_whole(block: bytearray) -> bool:
    try:
        return frame_format.scan(block).stop == len(block)
    except FormatError:
        return False


def test_the_table_in_the_specification_is_the_table_in_code() -> None:
    rows = re.findall(
        r"^\| (\d+) \| ([ui]\d+) \| (\w+) \| (.+) \|$", SPECIFICATION.read_text(), re.M
    )
    codes = {"I": "u32", "H": "u16", "B": "u8", "Q": "u64", "q": "i64"}
    expected = [
        (str(frame_format.OFFSETS[field.name]), codes[field.code], field.name, field.meaning)
        for field in frame_format.FIELDS
    ]
    assert rows == expected


def test_every_op_is_in_the_specification() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", SPECIFICATION.read_text(), re.M))
    assert rows == {str(int(op)): op.name for op in Op}


def test_frames_of_version_1_are_still_packed_and_read_the_same() -> None:
    stored = GOLDEN.read_bytes()
    assert golden_window() == stored
    found = list(frame_format.iter_frames(stored))
    assert [view.op for view in found] == [1, 2, 3, 2, 64, 65]
    assert [view.position for view in found] == [
        *(Position(812, seq) for seq in range(5)),
        Position(900, 0),
    ]
    assert found[4].event_count == 4
    assert bytes(found[4].key) == b"0-1-812"
    assert found[2].before == b"" and found[2].after is None
    assert found[3].flags == Flag.HAS_AFTER | Flag.PARTIAL
    assert found[3].before is None


@given(st.lists(frames, max_size=8))
def test_what_is_packed_is_read_back_frame_by_frame_and_as_columns(packed: list[bytes]) -> None:
    block = b"".join(packed)
    one_by_one = list(frame_format.iter_frames(block))
    columns = frame_format.scan(block)
    assert [bytes(view.bytes) for view in one_by_one] == packed
    assert len(columns) == len(packed) and columns.stop == len(block)
    for name in ("op", "flags", "scn", "seq", "source_id", "key_hash", "schema_fp", "commit_us"):
        assert getattr(columns, name).tolist() == [getattr(view, name) for view in one_by_one]
    assert columns.length.tolist() == [view.length for view in one_by_one]
    assert columns.key_len.tolist() == [view.key_len for view in one_by_one]


@given(frames, st.data())
def test_any_flipped_bit_is_found(packed: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(packed) * 8 - 1))
    damaged = bytearray(packed)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        frame_format.read_frame(damaged)
    assert not scans_whole(damaged)


@given(st.binary(max_size=300))
def test_any_bytes_are_frames_or_a_format_error(noise: bytes) -> None:
    for read in (lambda: list(frame_format.iter_frames(noise)), lambda: frame_format.scan(noise)):
        try:
            read()
        except FormatError as error:
            assert "offset" in error.message


@pytest.mark.parametrize(
    ("field", "code", "value", "message"),
    [
        ("key_len", "<I", 5000, "parts need"),
        ("absent_len", "<I", 2**32 - 1, "parts need"),
        ("version", "B", 9, "version is 9"),
        ("op", "B", 200, "op 200 is unknown"),
        ("flags", "<H", 0x8002, "flags 0x8002"),
        ("reserved", "<H", 1, "reserved 0x1"),
    ],
)
def test_a_wrong_header_is_found_even_with_a_right_crc(
    field: str, code: str, value: int, message: str
) -> None:
    import google_crc32c

    good = frame_format.pack_frame(op=Op.INSERT, scn=1, seq=0, source=1, key=b"k", after=b"v")
    packed = bytearray(good)
    struct.pack_into(code, packed, frame_format.OFFSETS[field], value)
    struct.pack_into("<I", packed, 0, google_crc32c.value(bytes(packed[4:])))
    with pytest.raises(FormatError, match=message):
        frame_format.read_frame(packed)
    with pytest.raises(FormatError, match=message):
        frame_format.scan(good + packed + good)


@given(st.lists(frames, max_size=6), st.integers(1, 200))
def test_a_stream_cut_anywhere_comes_out_whole(packed: list[bytes], step: int) -> None:
    stream = b"".join(packed)
    splitter = FrameSplitter()
    out = b""
    for start in range(0, len(stream), step):
        block = splitter.feed(stream[start : start + step])
        assert sum(view.length for view in frame_format.iter_frames(block)) == len(block)
        out += block
    assert out == stream and splitter.pending_bytes == 0


def test_the_splitter_hands_out_nothing_after_damage() -> None:
    good = frame_format.pack_frame(op=Op.INSERT, scn=1, seq=0, source=1, key=b"k")
    splitter = FrameSplitter()
    assert splitter.feed(good) == good
    with pytest.raises(FormatError):
        splitter.feed(good[:-1] + b"\x01" + good)


@given(st.binary(max_size=100), st.integers(0, 7))
def test_every_crc_of_ours_agrees_with_the_library(data: bytes, start: int) -> None:
    import google_crc32c

    start = min(start, len(data))
    expected = google_crc32c.value(data[start:])
    array = np.frombuffer(data, dtype=np.uint8)
    plain = getattr(kernels.crc_by_tables, "py_func", kernels.crc_by_tables)
    assert kernels.crc32c(array, start, len(array)) == expected
    assert kernels.crc32c_by_tables(array, start, len(array)) == expected
    state = plain(kernels.CRC32C_TABLES, array, start, len(array), 0xFFFFFFFF)
    assert state ^ 0xFFFFFFFF == expected


def test_a_window_taken_in_parts_is_the_same_window() -> None:
    def build(take_every: int) -> bytes:
        window = WindowBuilder(5, 7)
        out = b""
        for number in range(10):
            window.event(Op.INSERT, 3, 4, b"%d" % number, after=b"x")
            if number % take_every == 0:
                out += window.take()
        return out + window.end("t")

    assert build(1) == build(4) == build(100)
    assert list(frame_format.iter_frames(build(3)))[-1].event_count == 10


@given(st.sets(st.integers(0, 40)))
def test_bitmaps_round_trip(bits: set[int]) -> None:
    assert frame_format.unpack_bitmap(frame_format.pack_bitmap(sorted(bits), 41)) == sorted(bits)


def test_source_numbers_are_stable_and_never_zero() -> None:
    assert frame_format.source_id("shop.orders") == 0x5B694759
    assert frame_format.source_id("shop.users") != frame_format.source_id("shop.orders")
