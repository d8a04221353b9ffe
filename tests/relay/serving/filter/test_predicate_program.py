"""The program of a predicate gives the results of its closures, or leaves a row to them."""

from __future__ import annotations

import datetime as dt
import decimal
import os
import random
import subprocess
import sys
import uuid
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from databus.common.errors import ReaderOvertaken
from databus.common.filters.predicate import parse_where
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op, pack_bitmap
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from databus.relay.ring.ring import Ring
from databus.relay.serving import row_filter
from databus.relay.serving.filter import predicate_kernels, text_kernels
from databus.relay.serving.filter.predicate_program import compile_program
from databus.relay.serving.header_cache import HeaderCache
from databus.relay.serving.row_filter import RowFilter, SlowRowsError
from tests.support.schemas import columns_of
from tests.support.waiting import PATIENCE

COLUMNS = columns_of(
    "id INT!, n INT, pad BYTES, big UINT64, rate FLOAT, total DECIMAL(30,2), "
    "huge NUMERIC, s STRING, t STRING, paid BOOL, day DATE, at TIMESTAMP, "
    "seen TIMESTAMPTZ, clock TIME, took TIME_SPAN, ref UUID"
)
TABLE = SourceSchema("shop.all", COLUMNS, ("s", "id"))
NEWER = SourceSchema("shop.all", (*COLUMNS, Column("note", Kind.STRING)), ("s", "id"))
SCHEMAS = SchemaSet([TABLE, NEWER])

WORDS = ["", "a", "A", "ab", "aB", "b%", "x_y", "ä", "Ä", "aä", "ſa", "K", "日本", "zzz"]
VALUES: dict[str, list[Any]] = {
    "id": [0, 1, -3, 7, 2**63 - 1, -(2**63)],
    "n": [None, 0, 3, -2, 2**62, 2**40],
    "pad": [None, b"", b"ab"],
    "big": [None, 0, 5, 2**63 - 1, 2**63, 2**64 - 1],
    "rate": [None, 0.0, -1.5, 3.0, float("nan"), float("inf"), 1e308],
    "total": [None, *map(decimal.Decimal, ("0.00", "1.50", "-2.25", "9" * 25))],
    "huge": [None, *map(decimal.Decimal, ("1", "2.5", "NaN", "1E+30"))],
    "s": WORDS,
    "t": [None, *WORDS],
    "paid": [None, True, False],
    "day": [None, dt.date(2026, 3, 1), dt.date(1969, 12, 31)],
    "at": [None, dt.datetime(2026, 3, 1, 12), dt.datetime(1970, 1, 1)],
    "seen": [None, dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)],
    "clock": [None, dt.time(8, 30)],
    "took": [None, dt.timedelta(hours=-30), dt.timedelta(0)],
    "ref": [None, uuid.UUID(int=5), uuid.UUID("aBcdef00-0000-0000-0000-000000000000")],
}
ATOMS = [
    "id < 7", "id > 7", "n <= 3", "3 >= n", "day < '2026-03-01'", "at >= '1970-01-01'",
    "id % 4 = 3", "-id > n", "id + n * 2 >= 7", "n - 5 < 1.5", "id = 7", "id <> 7.5", "7 < id",
    "n IN (1, 3, 2.5)", "n NOT IN (3, NULL)", "id IN (n, 7)", "n BETWEEN -2 AND 3", "n = NULL",
    "n IS NULL", "(n + id) IS NULL", "n * n > 5", "id % n = 0", "big > 5",
    "big = 9223372036854775807", "big < 18446744073709551615", "n < big", "rate > 1", "rate = 3",
    "rate <> 1.5", "rate + n > 2.5", "rate / n < 1", "-rate >= 1.5", "rate * rate > 1e300",
    "rate IN (3, 1.5)", "rate IS NULL", "total > 1.49", "total = '1.5'", "total BETWEEN -3 AND 1e3",
    "total IN (1.5, 2)", "total < id", "total * 2 = 3", "huge > 1", "huge IS NULL", "s = 'ab'",
    "s < t", "t >= 'ä'", "'A' <> t", "t IN ('ab', 'ä', 'x_y')", "t NOT IN ('ab')",
    "lower(t) = 'ab'", "upper(s) < 'B'", "lower(s) = upper(t)", "lower(t) IN ('ab', 'ä')",
    "t LIKE 'a%'", "t NOT LIKE '_b%'", "t LIKE '%ä'", "t LIKE '_'", "t LIKE 'x!_%' ESCAPE '!'",
    "t ILIKE '%B%'", "t ILIKE 'ä'", "lower(t) LIKE 'a_'", "length(t) = 2", "length(lower(t)) > 1",
    "length(pad) = 2", "t ILIKE 'Aab%' ESCAPE 'A'", "pad IS NOT NULL", "paid", "NOT paid",
    "paid = true", "paid IS FALSE", "(n > 1) IS NOT TRUE", "(n > 1) IS NULL", "paid = 1",
    "day = '2026-03-01'", "day < DATE '2026-01-01'", "day IN ('2026-03-01')", "day < at",
    "day = TIMESTAMP '2026-03-01 00:00:00'",
    "day IN (TIMESTAMP '2026-03-01 12:00:00', '2026-03-02')", "at > '2026-01-01'", "at = seen",
    "seen >= '2026-03-01T13:00:00+01:00'", "at < TIMESTAMPTZ '2026-03-01 12:00:00+00:00'",
    "clock < '09:00:00'", "took < '-29:59:59'", "ref = 'ABCDEF00-0000-0000-0000-000000000000'",
    "ref < '00000000-0000-0000-0000-000000000006'",
    "ref IN ('00000000-0000-0000-0000-000000000005')", "note = 'x'", "note IS NULL", "true",
    "1 = 2", "NULL", "id < 1e40", "id > 1e-40", "id > 1e999999",
]  # fmt: skip


def image(rng: random.Random) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in VALUES.items()}


def block_of(rng: random.Random, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A window of all kinds of changes of all kinds of rows."""
    builder = WindowBuilder(1, 1)
    for _ in range(count):
        op = rng.choice([Op.INSERT, Op.UPDATE, Op.UPDATE, Op.DELETE, Op.READ, Op.TRUNCATE])
        old = image(rng) if op in (Op.UPDATE, Op.DELETE) and rng.random() < 0.6 else None
        new = image(rng) if op in (Op.INSERT, Op.UPDATE, Op.READ) else None
        absent = b""
        if op == Op.UPDATE and rng.random() < 0.5:
            missing = rng.sample(range(len(COLUMNS)), 4)
            absent = pack_bitmap(missing, len(COLUMNS))
        builder.event(
            op,
            TABLE.source_id,
            TABLE.fingerprint,
            b"" if op == Op.TRUNCATE or rng.random() < 0.1 else TABLE.encode_key(image(rng)),
            before=None if old is None else TABLE.encode_row(old),
            after=None if new is None else TABLE.encode_row(new),
            absent=absent,
        )
    return np.frombuffer(builder.end(), dtype=np.uint8)


def compare(where: str, block: np.ndarray[Any, np.dtype[np.uint8]]) -> float:
    """Fail where program and closures differ; the share of rows that the program decides."""
    matcher = RowFilter(parse_where(where), SCHEMAS)
    rule = matcher._rule_of(TABLE.fingerprint)
    program = compile_program(matcher.predicate, TABLE, ["note"])
    columns = frame_format.scan(block, verify=False)
    rows = np.flatnonzero(columns.op < frame_format.FIRST_CONTROL_OP)
    matches = np.full(len(columns), predicate_kernels.UNDECIDED, dtype=np.int8)
    if program is not None:
        program.match(block, columns.offset, rows, matches)
    for index in rows[matches[rows] != predicate_kernels.UNDECIDED]:
        found = frame_format.trusted_frame(block.data, int(columns.offset[index]))
        assert rule.row_rule.takes(found) == matches[index], (where, found.op, index)
    return float(np.mean(matches[rows] != predicate_kernels.UNDECIDED))


@pytest.mark.parametrize("where", ATOMS)
def test_a_program_gives_what_the_closures_give(where: str) -> None:
    compare(where, block_of(random.Random(where), 300))


@settings(deadline=None, max_examples=60)
@given(
    st.recursive(
        st.sampled_from(ATOMS).map("({})".format),
        lambda inner: st.one_of(
            st.builds("({} AND {})".format, inner, inner),
            st.builds("({} OR {})".format, inner, inner),
            st.builds("(NOT {})".format, inner),
        ),
        max_leaves=5,
    ),
    st.integers(0, 1000),
)
def test_so_does_any_combination(where: str, seed: int) -> None:
    compare(where, block_of(random.Random(seed), 40))


@pytest.mark.parametrize(
    ("where", "least"),
    [
        ("id % 4 = 3 AND n IN (1, 2)", 0.5),
        ("n > 1 OR paid", 1.0),
        ("t = 'ab' AND day < '2026-03-02'", 1.0),
        ("t LIKE 'a%' OR t IS NULL", 1.0),
        ("total > 1.49 AND rate < 2", 0.7),
        ("seen > '2026-01-01' AND n BETWEEN 1 AND 5", 1.0),
        ("huge > 1 AND id = 7", 0.5),
    ],
)
def test_usual_requests_are_compiled_without_python(where: str, least: float) -> None:
    assert compare(where, block_of(random.Random(1), 400)) >= least


def test_an_unsupported_condition_has_no_program() -> None:
    assert compile_program(parse_where("huge > 1"), TABLE) is None


def test_a_program_that_needs_too_much_room_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    where = parse_where("id = 7 OR (id = 8 AND (n = 1 OR n = 2))")
    monkeypatch.setattr(predicate_kernels, "MAX_DEPTH", 4)
    assert compile_program(where, TABLE) is not None
    monkeypatch.setattr(predicate_kernels, "MAX_DEPTH", 3)
    assert compile_program(where, TABLE) is None


def test_damaged_rows_are_left_to_the_decoder_that_names_the_damage() -> None:
    program = compile_program(parse_where("t = 'ab' AND n = 3 AND rate > 0 AND total > 0"), TABLE)
    assert program is not None
    whole = bytearray(block_of(random.Random(3), 1))
    rng, offsets = random.Random(5), np.zeros(1, dtype=np.int64)
    for _ in range(3000):
        block = whole.copy()
        for _ in range(rng.randrange(1, 6)):
            block[rng.randrange(11, len(block))] = rng.randrange(256)
        matches = np.zeros(1, dtype=np.int8)
        program.match(np.frombuffer(block, dtype=np.uint8), offsets, offsets, matches)
        assert matches[0] in (-1, 0, 1)
    cut = np.frombuffer(bytes(whole[:76]), dtype=np.uint8)
    program.match(cut, offsets, offsets, matches)
    assert matches[0] == predicate_kernels.UNDECIDED


@pytest.mark.parametrize(
    ("pattern", "text", "truth"),
    [
        ("%ab%cd%", "xabab" * 2000 + "cd", text_kernels.TRUE),
        ("%abc", "ab" * 5000, text_kernels.FALSE),
        ("%", "", text_kernels.TRUE),
        ("", "", text_kernels.TRUE),
        ("%" + "a" * 500 + "b", "a" * 5000, text_kernels.UNSURE),
    ],
)
def test_a_pattern_that_would_take_long_is_left_to_the_regular_expressions(
    pattern: str, text: str, truth: int
) -> None:
    tokens = bytearray()
    for character in pattern:
        kind = text_kernels.ANY_TEXT if character == "%" else text_kernels.LITERAL
        tokens += bytes((kind, ord(character)))
    found = text_kernels.like(
        np.frombuffer(text.encode(), dtype=np.uint8),
        0,
        len(text),
        np.frombuffer(bytes(tokens), dtype=np.uint8),
        0,
        len(tokens),
        text_kernels.FOLD_NONE,
    )
    assert found == truth


def digest() -> int:
    """Of all results that programs give over a few rows."""
    block = block_of(random.Random(8), 30).copy()  # which may be written
    columns = frame_format.scan(block, verify=False)
    rows = np.flatnonzero(columns.op < frame_format.FIRST_CONTROL_OP)
    matches = np.zeros((len(ATOMS), len(columns)), dtype=np.int8)
    for number, where in enumerate(ATOMS):
        program = compile_program(parse_where(where), TABLE, ["note"])
        if program is not None:
            program.match(block, columns.offset, rows, matches[number])
    return zlib.crc32(matches.tobytes())


def test_the_kernel_does_the_same_undecorated_and_is_compiled_in_one_form() -> None:
    program = (
        "from tests.relay.serving.filter import test_predicate_program as t; print(t.digest())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=Path(__file__).resolve().parents[4],
        env={**os.environ, "DATABUS_NO_NUMBA": "1"},
        capture_output=True,
        check=True,
        timeout=60 * PATIENCE,
    )
    assert int(done.stdout) == digest()
    kernel: Any = predicate_kernels.match_frames
    assert len(kernel.signatures) == 1, "no reader waits for another one"


# ---- over the directory of a ring ----


@pytest.fixture
def listed(tmp_path: Path) -> Any:
    with Ring.create(tmp_path, 1 << 20) as writer:
        block = block_of(random.Random(9), 400)
        writer.append(block.data)
        with Ring.open_reader(tmp_path) as reader:
            cached_headers = HeaderCache().at(reader, reader.snapshot().head)
            assert cached_headers is not None
            yield writer, reader, cached_headers, block


@pytest.mark.parametrize("where", ["n > 1 OR t LIKE 'a%'", "lower(t) = 'ä' OR huge > 1"])
def test_cached_headers_are_filtered_as_a_copy_is(listed: Any, where: str) -> None:
    _, reader, cached_headers, block = listed
    taken = np.ones(len(cached_headers.columns), dtype=np.bool_)
    wanted = RowFilter(parse_where(where), SCHEMAS).refine(
        taken, frame_format.scan(block, verify=False), block, None
    )
    matcher = RowFilter(parse_where(where), SCHEMAS)
    half = taken.copy()
    half[::2] = False
    first = matcher.refine_cached(cached_headers, reader, half)
    assert (first == (wanted & half)).all()
    decided = matcher.decided_count
    assert (matcher.refine_cached(cached_headers, reader, taken) == wanted).all()
    assert matcher.decided_count - decided == 400 - decided
    assert (matcher.refine_cached(cached_headers, reader, taken) == wanted).all()
    assert matcher.decided_count == 400


def test_headers_that_are_overwritten_meanwhile_give_no_match(
    listed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader, cached_headers, _ = listed
    matcher = RowFilter(parse_where("n > 1"), SCHEMAS)

    def overwritten(*arguments: Any) -> None:
        _lap(writer)
        arguments[-1][:] = predicate_kernels.LEFT_OUT  # as it may seem by then

    monkeypatch.setattr(matcher, "_by_program", overwritten)
    with pytest.raises(ReaderOvertaken):
        matcher.refine_cached(
            cached_headers, reader, np.ones(len(cached_headers.columns), dtype=np.bool_)
        )
    assert not matcher._listed


def _lap(writer: Any) -> None:
    for scn in range(2, 40):
        builder = WindowBuilder(scn, 1)
        builder.event(Op.INSERT, 1, 1, b"k", after=bytes(60_000))
        writer.append(builder.end())


def test_rows_that_take_python_are_read_block_by_block(
    listed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, reader, cached_headers, _ = listed
    monkeypatch.setattr(row_filter, "MAX_BY_HAND", 10)
    matcher = RowFilter(parse_where("huge > 1"), SCHEMAS)
    assert matcher.uses_cached_headers
    with pytest.raises(SlowRowsError):
        matcher.refine_cached(
            cached_headers, reader, np.ones(len(cached_headers.columns), dtype=np.bool_)
        )
    assert not matcher.uses_cached_headers


def test_matches_of_the_header_cache_are_cached_within_bounds(
    listed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, cached_headers, _ = listed
    monkeypatch.setattr(row_filter, "MAX_LISTED", 2 * len(cached_headers.offsets))
    matcher = RowFilter(parse_where("n > 1"), SCHEMAS)
    for start in range(5):
        matcher._store((start, start + 1), np.zeros(len(cached_headers.offsets), dtype=np.int8))
    assert list(matcher._listed) == [(3, 4), (4, 5)]
    assert matcher._listed_count == 2 * len(cached_headers.offsets)
