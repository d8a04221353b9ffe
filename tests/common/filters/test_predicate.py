"""Predicates over rows: against SQLite, kind by kind, and everything that is refused."""

from __future__ import annotations

import datetime as dt
import decimal
import sqlite3
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlglot import exp

from databus.common.errors import BadFilter
from databus.common.filters.predicate import compile_predicate, like_matcher, parse_where
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.serving.filter.predicate_program import compile_program
from tests.support.schemas import columns_of

COLUMNS = columns_of(
    "id INT!, n INT, big UINT64, rate FLOAT, total DECIMAL(10,2), huge NUMERIC, "
    "state STRING, Mixed STRING, raw BYTES, paid BOOL, day DATE, at TIMESTAMP, "
    "seen TIMESTAMPTZ, clock TIME, took TIME_SPAN, ref UUID, doc JSON"
)
ROW: dict[str, Any] = {
    "id": 7,
    "n": None,
    "big": 2**64 - 1,
    "rate": 0.1,
    "total": decimal.Decimal("120.50"),
    "huge": decimal.Decimal("1e30"),
    "state": "Paid",
    "Mixed": "x%y",
    "raw": b"abc",
    "paid": True,
    "day": dt.date(2026, 3, 1),
    "at": dt.datetime(2026, 3, 1, 12),
    "seen": dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC),
    "clock": dt.time(8, 30),
    "took": dt.timedelta(hours=-30),
    "ref": uuid.UUID(int=5),
    "doc": '{"a":1}',
}


def value_of(text: str, row: dict[str, Any] = ROW) -> bool | None:
    return compile_predicate(parse_where(text), COLUMNS)(row)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("total > 100 AND state IN ('new','Paid')", True),
        ("total > 100 AND state IN ('new','paid')", False),
        ("total = '120.5'", True),
        ("total * 2 = 241", True),
        ("n = 1", None),
        ("n = NULL", None),
        ("n IS NULL", True),
        ("n IS NOT NULL", False),
        ("n = 1 OR id = 7", True),
        ("n = 1 AND id = 8", False),
        ("NOT (n = 1)", None),
        ("NOT (n = 1 AND id = 8)", True),
        ("id IN (1, NULL)", None),
        ("id IN (7, NULL)", True),
        ("id NOT IN (1, 2)", True),
        ("id NOT IN (7, n)", False),
        ("'Paid' IN (state, mixed)", True),
        ("id BETWEEN 7 AND 9", True),
        ("id NOT BETWEEN 7 AND 9", False),
        ("id BETWEEN n AND 3", False),
        ("big = 18446744073709551615", True),
        ("big > 1e3", True),
        ("rate = 0.1", True),
        ("rate < total", True),
        ("huge > 5 AND huge = 1e30", True),
        ("id / 2 = 3.5", True),
        ("id / 0 = 1", None),
        ("id % 0 = 1", None),
        ("-id % 4 = -3", True),
        ("rate % 0 > 1", None),
        ("id + 1 - 2 * 3 = 2", True),
        ("-total < -(id)", True),
        ("lower(state) = 'paid' AND upper(state) = 'PAID'", True),
        ("length(state) = 4 AND char_length(raw) = 3", True),
        ("state LIKE 'P%d'", True),
        ("state LIKE 'p%'", False),
        ("state ILIKE 'p__D'", True),
        ("state NOT LIKE 'p%'", True),
        ("mixed LIKE 'x\\%y' AND mixed LIKE 'x!%y' ESCAPE '!'", True),
        ("mixed LIKE 'xx!%y' ESCAPE '!'", False),
        ("\"Mixed\" = 'x%y' AND MIXED = 'x%y'", True),
        ("paid", True),
        ("NOT paid", False),
        ("paid = true AND paid IS TRUE AND (n > 1) IS NOT FALSE", True),
        ("paid = 1", True),
        ("paid = 'false'", False),
        ("day = '2026-03-01' AND day < DATE '2026-03-02'", True),
        ("day < at AND at = seen AND day < seen", True),
        ("at > TIMESTAMP '2026-03-01 11:59:59.999999'", True),
        ("seen = '2026-03-01T13:00:00+01:00'", True),
        ("seen >= TIMESTAMPTZ '2026-03-01 12:00:00'", True),
        ("day = TIMESTAMP '2026-03-01 00:00:00'", True),
        ("clock < '09:00:00' AND clock = TIME '08:30:00'", True),
        ("took < '-29:59:59'", True),
        ("ref = '00000000-0000-0000-0000-000000000005'", True),
        ("doc LIKE '%1%'", True),
        ("true", True),
        ("NULL", None),
        (" AND ".join(["id = 7"] * 300), True),
    ],
)
def test_a_predicate_has_the_value_that_sql_gives_it(text: str, wanted: bool | None) -> None:
    assert value_of(text) is wanted


def test_a_nan_among_decimals_is_neither_more_nor_less() -> None:
    row = {**ROW, "huge": decimal.Decimal("NaN")}
    assert value_of("huge > 1", row) is None
    assert value_of("huge + 1 < 1 OR id = 7", row) is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope = 1", r"unknown column 'nope'.*known are: .*state"),
        ("stat = 'x'", r"'stat' \(did you mean state\?\)"),
        ('"mixed" = 1', "unknown column 'mixed'"),
        ("sleep(1) = 1", r"unknown function 'sleep'.*known are: length, lower, upper"),
        ("lowr(state) = 'x'", r"did you mean lower\?"),
        ("coalesce(n, 1) = 1", "unknown function 'coalesce'"),
        ("state > 5", "compares text with int"),
        ("day > 5", "compares date with int"),
        ("total = 'much'", "'much' is no decimal"),
        ("day = 'soon'", "'soon' is no date"),
        ("day = '2026-03-01 12:00:00'", "write TIMESTAMP"),
        ("raw = 'abc'", "bytes compares with no literal"),
        ("state", "is text, not a condition"),
        ("id AND paid", "is int, not a condition"),
        ("state + 1 = 2", "needs numbers, not text"),
        ("-state = 'a'", "needs a number"),
        ("lower(id) = '7'", "needs text"),
        ("state LIKE mixed", "LIKE takes a pattern"),
        ("state LIKE 'x' ESCAPE 'ab'", "ESCAPE one character"),
        ("id IN (SELECT 1)", "not understood|IN takes a list|query"),
        ("id = (SELECT 1)", "not understood"),
        ("orders.id = 1", "write the column alone"),
        ("CAST(id AS TEXT) = '7'", "only literals have a type"),
        ("INTERVAL '1' DAY = took", "not understood"),
        ("id IS 7", "IS takes NULL, TRUE or FALSE"),
        ("id = ?", "not understood"),
        ("CASE WHEN paid THEN 1 ELSE 2 END = 1", "function|not understood"),
        ("id = 1; DROP TABLE orders", "no SQL predicate"),
        ("id = ", "no SQL predicate"),
        ("", "no SQL predicate"),
        ("'open", "no SQL predicate"),
        ("(" * 1500 + "paid" + ")" * 1500, "deep|no SQL predicate"),
        ("+".join(["id"] * 200) + " = 1", "nested more than 60 deep"),
        ("id = 1 OR " * 500 + "paid", "over the limit of 4096"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_name(text: str, message: str) -> None:
    with pytest.raises(BadFilter, match=message):
        compile_predicate(parse_where(text), COLUMNS)


@pytest.mark.parametrize(
    "text",
    [
        "id IN (" + ", ".join(map(str, range(500))) + ")",
        "+".join(["id"] * 50) + " < 7 AND n BETWEEN 1 AND 5 AND state LIKE 'x%'",
    ],
)
def test_a_predicate_that_is_understood_is_not_put_into_words(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicate = parse_where(text)

    def into_words(*_: Any, **__: Any) -> str:
        raise AssertionError("which takes as long as the predicate has parts, for each of them")

    for kind in (exp.In, exp.Add, exp.LT, exp.Between, exp.Like, exp.And):
        monkeypatch.setattr(kind, "sql", into_words)
    compile_predicate(predicate, COLUMNS)
    compile_program(predicate, SourceSchema("shop.all", COLUMNS, ("id",)))


def test_a_column_of_another_version_is_null_and_one_that_the_row_lacks_is_unknown() -> None:
    predicate = parse_where("note = 'x' OR note IS NULL")
    assert compile_predicate(predicate, COLUMNS, ("note",))(ROW) is True
    partial = {"id": 7}
    with pytest.raises(KeyError):
        value_of("state IS NOT NULL", partial)
    with pytest.raises(KeyError):
        value_of("state = 'x' AND id = 7", partial)
    assert value_of("state = 'x' AND id = 8", partial) is False
    assert value_of("state = 'x' OR id = 7", partial) is True


def test_predicates_that_differ_in_spaces_and_comments_are_the_same() -> None:
    one, two = parse_where("id=7  and paid"), parse_where("id = 7 AND paid -- all")
    assert one == two
    assert one != parse_where("id = 8 AND paid")


@given(st.text("ab%_!", max_size=6), st.text("ab%", max_size=8), st.sampled_from(["", "!"]))
def test_like_matches_what_sqlite_matches(pattern: str, text: str, escape: str) -> None:
    if escape and (pattern.count("!") and pattern.replace("!!", "").endswith("!")):
        return  # an escape with nothing after it means something else everywhere
    with sqlite3.connect(":memory:") as database:
        database.execute("PRAGMA case_sensitive_like = ON")
        clause = "? LIKE ? ESCAPE ?" if escape else "? LIKE ?"
        values = (text, pattern, escape) if escape else (text, pattern)
        (wanted,) = database.execute(f"SELECT {clause}", values).fetchone()
    database.close()
    assert like_matcher(pattern, escape)(text) is bool(wanted)


def test_a_hostile_like_pattern_takes_no_time_to_speak_of() -> None:
    assert not like_matcher("%a" * 200 + "b", "")("a" * 20_000)


_NUMBERS = st.sampled_from(["a", "b", "1", "0", "-2", "NULL", "a + b", "a * 2", "b % 3", "-a"])
_TEXTS = st.sampled_from(["s", "'x'", "'Xy'", "lower(s)", "upper(s)"])
_COMPARED = st.sampled_from(["=", "<>", "<", "<=", ">", ">="])
_CONDITIONS = st.recursive(
    st.one_of(
        st.builds("({} {} {})".format, _NUMBERS, _COMPARED, _NUMBERS),
        st.builds("({} {} {})".format, _TEXTS, _COMPARED, _TEXTS),
        st.builds("({} IN ({}, {}))".format, _NUMBERS, _NUMBERS, _NUMBERS),
        st.builds("({} NOT IN ({}, 'x'))".format, st.just("s"), _TEXTS),
        st.builds("({} BETWEEN {} AND {})".format, _NUMBERS, _NUMBERS, _NUMBERS),
        st.builds("(s {} '{}')".format, st.sampled_from(["LIKE", "NOT LIKE"]), st.text("xyX%_")),
        st.builds("({} IS {}NULL)".format, _NUMBERS, st.sampled_from(["", "NOT "])),
        st.builds("(length(s) > {})".format, _NUMBERS),
    ),
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("(NOT {})".format, inner),
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    _CONDITIONS,
    st.none() | st.integers(-3, 3),
    st.none() | st.integers(-3, 3),
    st.none() | st.text("xyX", max_size=3),
)
def test_any_condition_gives_what_sqlite_gives(
    text: str, a: int | None, b: int | None, s: str | None
) -> None:
    columns = (Column("a", Kind.INT), Column("b", Kind.INT), Column("s", Kind.STRING))
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA case_sensitive_like = ON")
    database.execute("CREATE TABLE t (a INTEGER, b INTEGER, s TEXT)")
    database.execute("INSERT INTO t VALUES (?, ?, ?)", (a, b, s))
    (wanted,) = database.execute(f"SELECT {text} FROM t").fetchone()
    database.close()
    found = compile_predicate(parse_where(text), columns)({"a": a, "b": b, "s": s})
    assert found is (None if wanted is None else bool(wanted))
