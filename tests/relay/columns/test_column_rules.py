"""Rules for columns: what each does to rows, keys, schemas and frames, and what is refused."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import hmac
import json
import sqlite3
import uuid
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from databus.common.compiled.kernels import COMPILED
from databus.common.config import DatabaseConfig
from databus.common.errors import (
    BadRequest,
    ConfigError,
    DumpFailed,
    FormatError,
    UnsupportedChange,
)
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameView, Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.capture.source_catalogue import create_source
from databus.relay.columns.column_rewriting import Rewriter
from databus.relay.columns.column_rules import ColumnRules, effective_columns
from databus.relay.columns.key_encryption import KeyEncryption
from databus.relay.columns.ruled_source import RuledSource
from databus.relay.sources.contract import (
    Batch,
    Chunk,
    ChunkRequest,
    RelayingSource,
    ResumableSource,
    WatermarkingSource,
)
from databus.relay.sources.row_buffers import Row, Rows

SALT = "pepper and salt"
CUSTOMERS = SourceSchema(
    "shop.customers",
    (
        Column("id", Kind.INT, nullable=False),
        Column("email", Kind.STRING),
        Column("ssn", Kind.STRING, nullable=False),
        Column("note", Kind.STRING),
        Column("born", Kind.DATE),
    ),
    ("id",),
)
ROW = (7, "alice@example.com", "123-45", "Grüße aus Köln", dt.date(1990, 1, 2))
ways = pytest.mark.parametrize("compiled", [False, True])


def rules(**values: Any) -> ColumnRules:
    if "hash_columns" in values:
        values.setdefault("hash_salt", SALT)
    return ColumnRules(
        DatabaseConfig.model_validate({"name": "shop", "url": "sqlite:///x"} | values)
    )


def digest(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    return hmac.new(SALT.encode(), data, hashlib.sha256).hexdigest()


def block(schema: SourceSchema, row: Any, *, absent: bytes = b"", scn: int = 5) -> bytes:
    """A window with an insert, an update, a delete and a truncate of ``row``."""
    window = WindowBuilder(scn, 1_000_000)
    key, data = schema.encode_key([row[i] for i in key_indexes(schema)]), schema.encode_row(row)
    source, fingerprint = schema.source_id, schema.fingerprint
    window.event(Op.INSERT, source, fingerprint, key, after=data)
    window.event(Op.UPDATE, source, fingerprint, key, before=data, after=data, absent=absent)
    window.event(Op.DELETE, source, fingerprint, key, before=data)
    window.event(Op.TRUNCATE, source, fingerprint, b"")
    return window.end("tx")


def key_indexes(schema: SourceSchema) -> list[int]:
    names = [column.name for column in schema.columns]
    return [names.index(name) for name in schema.key]


def rewritten(
    given_rules: ColumnRules, schema: SourceSchema, data: bytes, *, compiled: bool = COMPILED
) -> tuple[SourceSchema, list[FrameView]]:
    rewriter = Rewriter(given_rules, compiled=compiled)
    batch = rewriter.batch(Batch(data, (schema,), resolved=5))
    assert batch.resolved == 5
    (seen,) = batch.schemas
    return seen, list(frame_format.iter_frames(batch.data))


@ways
def test_each_rule_has_its_effect_and_nothing_of_the_value_is_left(compiled: bool) -> None:
    given_rules = rules(
        exclude_columns=["shop.*.ssn"],
        hash_columns=["*.*.email"],
        truncate_columns={"shop.customers.note": 3},
        mask_columns={"shop.customers.born": "***"},
    )
    schema, frames = rewritten(given_rules, CUSTOMERS, block(CUSTOMERS, ROW), compiled=compiled)
    assert [column.name for column in schema.columns] == ["id", "email", "note", "born"]
    row = {"id": 7, "email": digest("alice@example.com"), "note": "Grü", "born": "***"}
    insert, update, delete, truncate, end = frames
    assert schema.decode_row(insert.after or b"") == row
    assert schema.decode_row(update.before or b"") == row == schema.decode_row(update.after or b"")
    assert schema.decode_row(delete.before or b"") == row
    assert truncate.op == Op.TRUNCATE and truncate.schema_fp == schema.fingerprint
    assert (end.op, end.seq, end.event_count) == (Op.END_OF_WINDOW, 4, 4)
    assert [view.seq for view in frames] == [0, 1, 2, 3, 4]
    whole = b"".join(bytes(view.bytes) for view in frames)
    for secret in (b"alice", b"123-45", "Köln".encode()):
        assert secret not in whole


@ways
def test_null_stays_null_and_a_column_can_be_made_null(compiled: bool) -> None:
    given_rules = rules(
        hash_columns=["shop.customers.email"],
        mask_columns={"shop.customers.note": 5},
        null_columns=["shop.customers.ssn"],
    )
    row = (7, None, "123-45", None, None)
    schema, frames = rewritten(given_rules, CUSTOMERS, block(CUSTOMERS, row), compiled=compiled)
    assert schema.decode_row(frames[0].after or b"") == {
        "id": 7, "email": None, "ssn": None, "note": None, "born": None,
    }  # fmt: skip
    filled, frames = rewritten(given_rules, CUSTOMERS, block(CUSTOMERS, ROW), compiled=compiled)
    assert filled.decode_row(frames[0].after or b"")["note"] == "*****"


@ways
def test_a_hashed_key_column_is_hashed_in_key_and_row_alike(compiled: bool) -> None:
    schema = SourceSchema(
        "shop.logins",
        (Column("day", Kind.INT, nullable=False), Column("email", Kind.STRING, nullable=False)),
        ("email", "day"),
    )
    data = block(schema, (-12, "bob@example.com"))
    seen, frames = rewritten(
        rules(hash_columns=["*.email", "*.day"]), schema, data, compiled=compiled
    )
    row = seen.decode_row(frames[0].after or b"")
    assert row == seen.decode_key(frames[0].key)
    assert row == {"email": digest("bob@example.com"), "day": digest("-12")}
    assert frames[0].key_hash == frame_format.key_hash(frames[0].key)


@ways
def test_absent_columns_are_counted_in_those_that_are_left(compiled: bool) -> None:
    absent = frame_format.pack_bitmap([2, 4], 5)
    data = block(CUSTOMERS, ROW, absent=absent)
    schema, frames = rewritten(
        rules(exclude_columns=["*.email"]), CUSTOMERS, data, compiled=compiled
    )
    assert schema.absent_names(frames[1].absent) == ("ssn", "born")
    schema, frames = rewritten(
        rules(exclude_columns=["*.ssn", "*.born"]), CUSTOMERS, data, compiled=compiled
    )
    assert frames[1].absent_len == 0
    assert not frames[1].flags & frame_format.Flag.PARTIAL


@ways
def test_skipped_operations_leave_and_ends_of_windows_stay_as_they_were(compiled: bool) -> None:
    data = block(CUSTOMERS, ROW)
    _, frames = rewritten(rules(skipped_operations=["d", "t"]), CUSTOMERS, data, compiled=compiled)
    assert [(view.op, view.seq) for view in frames] == [
        (Op.INSERT, 0), (Op.UPDATE, 1), (Op.END_OF_WINDOW, 4),
    ]  # fmt: skip
    assert frames[-1].event_count == 4


def test_a_batch_that_no_rule_is_about_is_handed_on_as_it_is() -> None:
    data = block(CUSTOMERS, ROW)
    rewriter = Rewriter(rules(exclude_columns=["shop.orders.*"]))
    assert rewriter.batch(Batch(data, (CUSTOMERS,))).data is data


def test_include_retains_the_named_columns_and_the_key_of_the_named_tables() -> None:
    plan = rules(include_columns=["shop.customers.note"]).plan(CUSTOMERS)
    assert plan is not None
    assert [column.name for column in plan.after.columns] == ["id", "note"]
    assert rules(include_columns=["shop.orders.*"]).plan(CUSTOMERS) is None
    both = rules(include_columns=["shop.customers.*"], exclude_columns=["*.ssn"])
    assert effective_columns(both, CUSTOMERS) == "id, email, ssn (excluded), note, born"


def test_a_column_that_comes_in_mid_stream_falls_under_the_same_patterns() -> None:
    rewriter = Rewriter(rules(exclude_columns=["shop.customers.*card*"]))
    wider = SourceSchema(
        CUSTOMERS.source, (*CUSTOMERS.columns, Column("card_number", Kind.STRING)), CUSTOMERS.key
    )
    window = WindowBuilder(6, 0)
    window.control(
        Op.SCHEMA_CHANGE,
        source=wider.source_id,
        schema_fp=wider.fingerprint,
        after=json.dumps(wider.to_json()).encode(),
    )
    row = wider.encode_row((*ROW, "4111 1111"))
    window.event(Op.INSERT, wider.source_id, wider.fingerprint, wider.encode_key((7,)), after=row)
    rewriter.batch(Batch(block(CUSTOMERS, ROW), (CUSTOMERS,)))
    batch = rewriter.batch(Batch(window.end(), (wider,)))
    change, insert, _ = frame_format.iter_frames(batch.data)
    restored = SourceSchema.from_json(json.loads(bytes(change.after or b"")))
    assert restored == CUSTOMERS == batch.schemas[0]
    assert change.schema_fp == insert.schema_fp == CUSTOMERS.fingerprint
    assert b"4111" not in batch.data and b"card" not in batch.data


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 14), other=st.integers(0, 14))
def test_a_stream_that_is_read_again_in_other_pieces_gives_the_same_bytes(
    cut: int, other: int
) -> None:
    data = b"".join(block(CUSTOMERS, ROW, scn=scn) for scn in range(1, 4))
    offsets = [0, *(view.offset for view in frame_format.iter_frames(data)), len(data)]
    given_rules = rules(hash_columns=["*.email"], skipped_operations=["u"])

    def read(at: int) -> bytes:
        rewriter = Rewriter(given_rules)
        first = rewriter.batch(Batch(data[: offsets[at]], (CUSTOMERS,)))
        return first.data + rewriter.batch(Batch(data[offsets[at] :])).data

    assert read(cut) == read(other)


@ways
def test_rows_of_a_chunk_have_the_bytes_that_the_stream_has(compiled: bool) -> None:
    schema = replace(CUSTOMERS, key=("id", "ssn"))
    given_rules = rules(hash_columns=["*.ssn", "*.born"], exclude_columns=["*.note"])
    rewriter = Rewriter(given_rules, compiled=compiled)
    rows = [(number, *ROW[1:]) for number in range(3)]
    raw = [Row(schema.encode_key([row[0], row[2]]), schema.encode_row(row)) for row in rows]
    chunk = rewriter.chunk(Chunk(schema, Rows.of(raw), Shown(9), ["x"], done=True))
    seen, frames = rewritten(given_rules, schema, b"".join(block(schema, row) for row in rows))
    assert chunk.schema == seen and chunk.last_key == ["x"]
    streamed = [
        (bytes(view.key), bytes(view.after or b"")) for view in frames if view.op == Op.INSERT
    ]
    assert [(row.key, row.row) for row in chunk.rows] == streamed


# -- a source behind the rules


async def test_a_value_that_cannot_be_carried_is_not_shown_if_a_rule_is_about_its_column(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shop.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("CREATE TABLE people (id INTEGER PRIMARY KEY, pin INTEGER, n INTEGER)")
    settings_ = {"name": "shop", "url": f"sqlite:///{path}", "null_columns": ["*.people.pin"]}
    source = create_source(DatabaseConfig.model_validate(settings_))
    await source.open()
    try:
        start = await source.first_scn()
        connection.execute("INSERT INTO people VALUES (1, 'my secret', 1)")
        async with contextlib.aclosing(source.stream(start)) as batches:
            async for batch in batches:
                if batch.resolved > start:
                    break
        status = await source.status()
        assert "main.people.pin is declared" in status["stopped_tables"]["main.people"]["why"]
        assert "secret" not in str(status)
        with pytest.raises(UnsupportedChange, match=r"main\.people\.pin") as raised:
            await source.read_chunk(ChunkRequest("main.people", 10, after=[0]))
        assert "secret" not in str(raised.value)
    finally:
        await source.close()
        connection.close()


async def test_watermarks_that_the_rules_would_change_are_refused() -> None:
    inner = Watermarked()
    with pytest.raises(DumpFailed, match="skipped_operations"):
        await ruled(inner, skipped_operations=["u"]).write_watermark("shop.marks", "t")
    with pytest.raises(DumpFailed, match=r"shop\.marks"):
        await ruled(inner, hash_columns=["*.token"], hash_salt="x").write_watermark(
            "shop.marks", "t"
        )
    source = ruled(inner, hash_columns=["shop.people.token"], hash_salt="x")
    assert isinstance(source, WatermarkingSource)
    await source.write_watermark("shop.marks", "t")
    assert inner.written == [("shop.marks", "t")]


def test_a_ruled_source_offers_what_its_source_offers_and_nothing_else() -> None:
    # From Python 3.12 on isinstance does not see what __getattr__ would find.
    plain, marking, resumable = ruled(object()), ruled(Watermarked()), ruled(Resumable())
    offers = [
        [isinstance(source, kind) for kind in (WatermarkingSource, ResumableSource)]
        for source in (plain, marking, resumable)
    ]
    # It has a resume state of its own: the tables that the rules did not fit.
    assert offers == [[False, True], [True, True], [False, True]]
    assert not any(isinstance(s, RelayingSource) for s in (plain, marking, resumable))
    plain.restore("state", None, 7)
    resumable.restore("state", None, 7)
    assert resumable._inner.restored == ("state", None, 7)


class Resumable:
    """What a source with a resume state has to offer."""

    restored: tuple[object, ...] = ()

    def restore(self, *restored: object) -> None:
        self.restored = restored


class Watermarked:
    """What a source that writes watermarks has to offer."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []

    async def schemas(self) -> list[SourceSchema]:
        columns = (Column("id", Kind.INT, nullable=False), Column("token", Kind.STRING))
        return [SourceSchema("shop.marks", columns, ("id",))]

    async def write_watermark(self, table: str, token: str) -> None:
        self.written.append((table, token))


def ruled(inner: Any, **values: Any) -> Any:
    config = {"name": "shop", "url": "sqlite:///x"} | values
    return RuledSource(inner, DatabaseConfig.model_validate(config))


@dataclass(frozen=True)
class Shown:
    """A snapshot that shows everything up to its point."""

    high: int

    def sees(self, scn: int, txid: str) -> bool:
        return scn <= self.high


# -- what is refused


@pytest.mark.parametrize(
    "values",
    [
        {"exclude_columns": ["*.id"]},
        {"null_columns": ["shop.customers.id"]},
        {"mask_columns": {"shop.customers.id": "x"}},
        {"truncate_columns": {"shop.customers.id": 2}},
    ],
)
def test_a_key_column_can_only_be_hashed(values: dict[str, Any]) -> None:
    (rule,) = values
    with pytest.raises(UnsupportedChange, match=rf"shop\.customers\.id.*key.*{rule}"):
        rules(**values).plan(CUSTOMERS)


def test_rules_that_contradict_each_other_are_both_named() -> None:
    both = rules(hash_columns=["*.email"], mask_columns={"shop.customers.e*": "x"})
    with pytest.raises(UnsupportedChange, match=r"hash_columns '\*\.email' and mask_columns 'shop"):
        both.plan(CUSTOMERS)
    masks = rules(mask_columns={"*.email": "x", "shop.*.email": "y"})
    with pytest.raises(UnsupportedChange, match=r"\['\*\.email', 'shop\.\*\.email'\] contradict"):
        masks.plan(CUSTOMERS)


def test_what_is_no_text_cannot_be_truncated() -> None:
    with pytest.raises(UnsupportedChange, match=r"customers\.born.*no text"):
        rules(truncate_columns={"*.born": 3}).plan(CUSTOMERS)


def test_exclusion_wins_over_other_rules_and_is_reported() -> None:
    both = rules(exclude_columns=["*.email"], hash_columns=["*.email"])
    (finding,) = both.findings([CUSTOMERS])
    assert not finding.fatal and "exclude_columns '*.email' and hash_columns" in finding.problem
    plan = both.plan(CUSTOMERS)
    assert plan is not None and "email" not in [column.name for column in plan.after.columns]


def test_a_pattern_that_names_no_column_is_named() -> None:
    (finding,) = rules(exclude_columns=["shop.customers.emial", "*.ssn"]).findings([CUSTOMERS])
    assert finding.setting == "exclude_columns" and not finding.fatal
    assert "'shop.customers.emial' matches no column" in finding.problem


def test_rows_of_an_unknown_schema_do_not_get_past_the_rules() -> None:
    rewriter = Rewriter(rules(exclude_columns=["*.ssn"]))
    with pytest.raises(Exception, match="before the schema"):
        rewriter.batch(Batch(block(CUSTOMERS, ROW)))


@ways
def test_a_damaged_row_is_refused(compiled: bool) -> None:
    rewriter = Rewriter(rules(exclude_columns=["*.ssn"]), compiled=compiled)
    window = WindowBuilder(5, 0)
    row = CUSTOMERS.encode_row(ROW)
    window.event(
        Op.INSERT, CUSTOMERS.source_id, CUSTOMERS.fingerprint, CUSTOMERS.encode_key((7,)),
        after=row[:-1],
    )  # fmt: skip
    with pytest.raises(FormatError):
        rewriter.batch(Batch(window.end(), (CUSTOMERS,)))


def test_a_salt_is_needed_and_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="hash_salt"):
        DatabaseConfig.model_validate(
            {"name": "a", "url": "sqlite:///x", "hash_columns": ["a.b.c"]}
        )
    config = DatabaseConfig.model_validate(
        {"name": "a", "url": "sqlite:///x", "hash_columns": ["a.b.c"], "hash_salt": "env:DB_SALT"}
    )
    with pytest.raises(ConfigError, match="DB_SALT"):
        ColumnRules(config)
    monkeypatch.setenv("DB_SALT", "xyzzy")
    ColumnRules(config)
    assert "DB_SALT" not in str(config) and config.hash_salt.reveal == "xyzzy"


# -- the parts below


@pytest.mark.parametrize("salt", ["k" * size for size in (16, 63, 64, 65, 300)])
def test_hashes_are_hmac_sha256_whatever_the_sizes(salt: str) -> None:
    schema = SourceSchema("shop.t", (Column("id", Kind.INT), Column("v", Kind.STRING)), ("id",))
    given_rules = rules(hash_columns=["shop.*.v"], hash_salt=salt)
    texts = ["x" * size for size in (0, 1, 54, 55, 56, 63, 64, 65, 119, 120, 1000)]
    window = WindowBuilder(5, 1)
    for number, text in enumerate(texts):
        row = schema.encode_row((number, text))
        window.event(Op.INSERT, schema.source_id, schema.fingerprint, b"", after=row)
    seen, frames = rewritten(given_rules, schema, window.end())
    assert [seen.decode_row(frame.after or b"")["v"] for frame in frames[:-1]] == [
        hmac.new(salt.encode(), text.encode(), hashlib.sha256).hexdigest() for text in texts
    ]


def test_a_seal_opens_with_its_secret_alone() -> None:
    key = ["alice@example.com", 12, None]
    sealed = KeyEncryption("one").seal(key)
    assert "alice" not in json.dumps(sealed)
    assert KeyEncryption("one").seal(key) == sealed
    assert KeyEncryption("one").open(sealed) == key
    assert KeyEncryption("one").open(key) == key
    with pytest.raises(BadRequest, match="hash_salt"):
        KeyEncryption("two").open(sealed)


VALUES: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.BOOL: st.booleans(),
    Kind.INT: st.integers(-(2**63), 2**63 - 1),
    Kind.UINT64: st.integers(0, 2**64 - 1),
    Kind.FLOAT: st.floats(allow_nan=False),
    Kind.DECIMAL: st.decimals(-9999, 9999, places=2),
    Kind.NUMERIC: st.decimals(allow_nan=False, allow_infinity=False),
    Kind.STRING: st.text(max_size=100),
    Kind.BYTES: st.binary(max_size=200),
    Kind.DATE: st.dates(),
    Kind.TIME: st.times(),
    Kind.TIMESTAMP: st.datetimes(),
    Kind.UUID: st.uuids(),
    Kind.JSON: st.sampled_from(["{}", '{"a": [1, "ü"]}']),
}


def hash_input(kind: Kind, value: Any) -> bytes | None:
    """What docs/columns.md says is hashed; None where this test does not spell it out again."""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, bytes):
        return value
    if isinstance(value, int) and kind is Kind.INT:
        return str(value).encode()
    if isinstance(value, str | uuid.UUID | Decimal) and kind is not Kind.DECIMAL:
        return str(value).encode()
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        return str((value - dt.date(1970, 1, 1)).days).encode()
    return None


def applied(action: str, kind: Kind, value: Any) -> Any:
    """The rule on a decoded value; ... where it is not spelled out."""
    if value is None or action == "null":
        return None
    if action == "mask":
        return "masked"
    if action == "truncate":
        return value[:3]
    if action == "hash":
        text = hash_input(kind, value)
        return ... if text is None else digest(text)
    return value


@st.composite
def tables(draw: st.DrawFn) -> tuple[SourceSchema, list[str], list[list[Any]]]:
    count = draw(st.integers(1, 12))
    kinds = [draw(st.sampled_from(list(VALUES))) for _ in range(count)]
    actions, columns = [], []
    in_key = draw(st.integers(1, count))
    for index, kind in enumerate(kinds):
        choices = ["keep", "hash"]
        if index >= in_key:
            choices += ["drop", "mask", "null"] + (["truncate"] if kind is Kind.STRING else [])
        actions.append(draw(st.sampled_from(choices)))
        nullable = index >= in_key and draw(st.booleans())
        columns.append(
            Column(f"c{index}", kind, nullable, *((6, 2) if kind is Kind.DECIMAL else ()))
        )
    names = tuple(column.name for column in columns)
    schema = SourceSchema("s.t", tuple(columns), names[:in_key])
    rows = [
        [
            draw(st.none() | VALUES[column.kind] if column.nullable else VALUES[column.kind])
            for column in columns
        ]
        for _ in range(draw(st.integers(1, 3)))
    ]
    return schema, actions, rows


@settings(max_examples=120, deadline=None)
@given(table=tables(), absent=st.integers(0, 4095))
def test_rewritten_frames_decode_to_the_rule_applied_to_the_decoded_row(
    table: tuple[SourceSchema, list[str], list[list[Any]]], absent: int
) -> None:
    schema, actions, rows = table
    named = {
        action: [
            f"s.t.{c.name}" for c, a in zip(schema.columns, actions, strict=True) if a == action
        ]
        for action in ("drop", "hash", "mask", "null", "truncate")
    }
    given_rules = rules(
        exclude_columns=named["drop"],
        null_columns=named["null"],
        mask_columns=dict.fromkeys(named["mask"], "masked"),
        truncate_columns=dict.fromkeys(named["truncate"], 3),
        **({"hash_columns": named["hash"]} if named["hash"] else {}),
    )
    bits = [index for index in range(len(actions)) if absent >> index & 1]
    bitmap = frame_format.pack_bitmap(bits, len(actions)) if bits else b""
    data = b"".join(block(schema, row, absent=bitmap, scn=n + 1) for n, row in enumerate(rows))
    seen, frames = rewritten(given_rules, schema, data)
    assert rewritten(given_rules, schema, data, compiled=False)[0] == seen
    slow = rewritten(given_rules, schema, data, compiled=False)[1]
    assert [bytes(view.bytes) for view in slow] == [bytes(view.bytes) for view in frames]
    left = [c.name for c, a in zip(schema.columns, actions, strict=True) if a != "drop"]
    assert [column.name for column in seen.columns] == left
    before = list(frame_format.iter_frames(data))
    for old, new in zip(before, frames, strict=True):
        assert (old.op, old.position, old.commit_us) == (new.op, new.position, new.commit_us)
        if old.is_control or old.op == Op.TRUNCATE:
            continue
        for part in ("before", "after"):
            if getattr(old, part) is None:
                assert getattr(new, part) is None
                continue
            row = schema.decode_row(getattr(old, part))
            wanted = {
                c.name: applied(a, c.kind, row[c.name])
                for c, a in zip(schema.columns, actions, strict=True)
                if a != "drop"
            }
            found = seen.decode_row(getattr(new, part))
            assert {n: found[n] if v is not ... else v for n, v in wanted.items()} == wanted
        key = seen.decode_key(new.key)
        assert key == {name: found[name] for name in schema.key}
        wanted_absent = [n for n in schema.absent_names(old.absent) if n in left]
        assert list(seen.absent_names(new.absent)) == wanted_absent
