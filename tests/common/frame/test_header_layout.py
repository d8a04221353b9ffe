"""The header's table against what is made from it, and the wall around it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import databus
from databus.common.compiled import kernels
from databus.common.frame import frame_format, header_layout
from databus.common.frame.header_layout import Flag, Op
from databus.common.frame.window_builder import end_of_window

_NUMBERS = re.compile(r"0xDB05\b(?!FADD)|\b56069\b|(?<![\w.\-])72(?![\w.])")
"""The magic, in both notations, and the header's size."""

words = st.integers(0, 2**64 - 1)
halves = st.integers(0, 2**32 - 1)


@given(
    st.sampled_from([Op.INSERT, Op.UPDATE, Op.DELETE]), words, halves, halves, words,
    st.integers(-(2**63), 2**63 - 1), st.binary(max_size=20), st.binary(max_size=30),
    st.binary(max_size=30), st.binary(max_size=3),
)  # fmt: skip
def test_kernels_seal_a_frame_as_python_packs_it(
    op: Op, scn: int, seq: int, source: int, schema_fp: int, commit_us: int, key: bytes,
    before: bytes, after: bytes, absent: bytes,
) -> None:  # fmt: skip
    expected = frame_format.pack_frame(
        op=op, scn=scn, seq=seq, source=source, schema_fp=schema_fp, commit_us=commit_us, key=key,
        before=before, after=after, absent=absent,
    )  # fmt: skip
    parts = key + before + after + absent
    out = np.full(len(expected) + 16, 0xEE, dtype=np.uint8)
    stop = 8 + header_layout.HEADER_BYTES + len(parts)
    out[8 + header_layout.HEADER_BYTES : stop] = np.frombuffer(parts, dtype=np.uint8)
    flags = Flag.HAS_BEFORE | Flag.HAS_AFTER | (Flag.PARTIAL if absent else 0)
    end = header_layout.seal(
        out, 8, stop, int(op), int(flags), *_signed(scn), seq, source,
        *_signed(frame_format.key_hash(key) if source else 0), *_signed(schema_fp), commit_us,
        len(key), len(before), len(after), len(absent),
    )  # fmt: skip
    assert end == 8 + len(expected)
    assert out[8:end].tobytes() == expected
    assert set(out[:8].tolist() + out[end:].tolist()) == {0xEE}
    frame = frame_format.read_frame(out, 8)
    assert header_layout.is_frame(out, 8) and header_layout.is_known(out, 8)
    assert header_layout.op_of(out, 8) == frame.op
    assert header_layout.flags_of(out, 8) == frame.flags
    hi, lo, read_seq = header_layout.position_of(out, 8)
    assert (int(hi) << 32 | int(lo), read_seq) == frame.position
    assert header_layout.source_of(out, 8) == frame.source_id
    assert header_layout.commit_us_of(out, 8) == frame.commit_us
    assert int(header_layout.schema_of(out, 8)) & (1 << 64) - 1 == frame.schema_fp
    assert int(header_layout.key_hash_of(out, 8)) & (1 << 64) - 1 == frame.key_hash
    assert header_layout.parts_of(out, 8) == (
        frame.key_len, frame.before_len, frame.after_len, frame.absent_len,
    )  # fmt: skip


@given(st.integers(0, 2**63 - 1), halves, st.integers(0, 2**62), st.integers(0, 2**63 - 1))
def test_kernels_close_a_window_as_python_does(
    scn: int, seq: int, commit_us: int, number: int
) -> None:
    expected = end_of_window(scn, seq, commit_us, seq, str(number))
    out = np.zeros(header_layout.WINDOW_END_BYTES + 20, dtype=np.uint8)
    txid_stop = kernels.put_digits(out, header_layout.HEADER_BYTES, number)
    end = header_layout.seal_window_end(out, 0, txid_stop, scn, seq, commit_us, seq)
    assert out[:end].tobytes() == expected
    header_layout.put_window_before(out, 0, 1, 2, 3)
    chained = frame_format.read_frame(out)
    assert (chained.key_hash, chained.schema_fp) == (1 << 32 | 2, 3)


def test_without_numba_a_kernel_seals_the_same_frame() -> None:
    program = """
import numpy as np
from databus.common.frame.header_layout import seal, seal_window_end
out = np.zeros(200, dtype=np.uint8)
stop = seal(out, 0, 75, 2, 3, -5, 4294967295, 4000000000, np.uint64(2**64 - 1), -2, -3, 1, 1, 1, 0)
print(out[: seal_window_end(out, stop, stop + 75, 9, 8, 7, 6)].tobytes().hex())
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **environment},
            check=True, capture_output=True, text=True,
        ).stdout
        for environment in ({"DATABUS_NO_NUMBA": ""}, {"DATABUS_NO_NUMBA": "1"})
    }  # fmt: skip
    assert len(printed) == 1
    frames = list(frame_format.iter_frames(bytes.fromhex(printed.pop())))
    assert [frame.op for frame in frames] == [Op.UPDATE, Op.END_OF_WINDOW]


def test_no_other_module_has_the_numbers_of_the_header() -> None:
    found = []
    for folder in map(Path, databus.__path__):
        for path in folder.rglob("*.py"):
            text = path.read_text()
            if path == Path(header_layout.__file__) or "frame" not in text:
                continue
            lines = text.splitlines()
            found += [f"{path}:{at}: {line}" for at, line in enumerate(lines, 1)
                      if _NUMBERS.search(line)]  # fmt: skip
    assert found == []


def _signed(number: int) -> tuple[int]:
    """As the kernels hold it: a machine word."""
    return (number - (1 << 64) if number >> 63 else number,)
