"""A table that a rule for columns does not fit is suspended, by name, until it is dumped again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from databus.common.config import DatabaseConfig
from databus.common.errors import FormatError, PreflightFailed, UnsupportedChange
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.columns.column_rules import ColumnRules
from databus.relay.columns.rule_suspensions import (
    RuledResumeState,
    UnfitTables,
    decode_ruled,
    is_ruled,
)
from databus.relay.columns.ruled_source import RuledSource
from databus.relay.processes.fetcher import Fetcher
from databus.relay.sources.contract import Batch, Chunk, ChunkRequest, Finding, Source, TableSize
from databus.relay.sources.sqlite import sqlite_source
from databus.relay.sources.suspended_tables import SuspensionState, TableSuspension
from tests.integration.test_suspended_tables import dump, rows_of
from tests.support.capture import capturing, failed_with, stored_resume_state, streaming
from tests.support.waiting import eventually

MASKED = {"mask_columns": {"*.email": "***"}}
HASHED = {"hash_columns": ["*.email"], "hash_salt": "pepper"}
CUT = {"truncate_columns": {"*.code": 2}}
FIT = SourceSchema(
    "shop.people",
    (Column("id", Kind.INT, nullable=False), Column("email", Kind.STRING, nullable=False)),
    ("id",),
)
UNFIT = replace(FIT, key=("email",))
OTHER = SourceSchema("shop.items", (Column("id", Kind.INT, nullable=False),), ("id",))


class Shop:
    """An SQLite database with a table ``item``, and the folder of a relay that reads it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.data_dir = folder / "shop.db", folder / "data"
        self.folder = self.data_dir / "shop"
        self.connection = sqlite3.connect(self.path, isolation_level=None)
        self.execute = self.connection.execute
        self.execute("PRAGMA journal_mode = WAL")
        self.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT)")
        self.count = 0

    def config(self, **rules: Any) -> DatabaseConfig:
        values = {"name": "shop", "url": f"sqlite:///{self.path}", "sync_every": 0.02}
        values["resync"] = "manual"
        return DatabaseConfig.model_validate(values | {"ring_bytes": "1MiB"} | rules)

    @contextlib.asynccontextmanager
    async def captured(self, **rules: Any) -> AsyncIterator[Fetcher]:
        async with capturing(self.config(**rules), self.data_dir) as fetcher:
            await streaming(fetcher)
            yield fetcher

    async def others_continue(self) -> None:
        """A row that is written now comes."""
        self.count += 1
        self.execute(f"INSERT INTO item (id) VALUES ({self.count})")
        await eventually(
            lambda: (self.count,) in self.table("main.item"), 20, "the others continue"
        )

    def table(self, source: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        return rows_of(self.folder, source)

    def written(self) -> bytes:
        """Every byte of every file of the relay."""
        files = sorted(p for p in self.data_dir.rglob("*") if p.is_file())
        return b"".join(path.read_bytes() for path in files if path.suffix != ".new")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(sqlite_source, "_IDLE_S", 0.05)
    shop = Shop(tmp_path)
    yield shop
    shop.connection.close()


def suspended(fetcher: Fetcher) -> dict[str, Any]:
    found: dict[str, Any] = fetcher.status.source.get("stopped_tables") or {}
    return found


def names(fetcher: Fetcher, source: str, why: str) -> Callable[[], bool]:
    """Whether the status names a suspended table, its reason, and what to do."""

    def announced() -> bool:
        warnings = fetcher.status.source.get("warnings") or []
        return bool(
            re.search(why, suspended(fetcher).get(source, {}).get("why", ""))
            and any(re.match(f"{source} is suspended.*dump the table", text) for text in warnings)
        )

    return announced


async def test_a_new_table_that_a_rule_does_not_fit_is_suspended_until_one_does_and_it_is_dumped(
    shop: Shop,
) -> None:
    async with shop.captured(**MASKED) as fetcher:
        shop.execute("CREATE TABLE people (email TEXT PRIMARY KEY, note TEXT)")
        await shop.others_continue()
        shop.execute("INSERT INTO people VALUES ('secret-1', 'a')")
        await shop.others_continue()
        await eventually(names(fetcher, "main.people", r"key .*mask_columns.*To fix it"), 20)
        assert "main.people" in stored_resume_state(fetcher)
    shop.execute("INSERT INTO people VALUES ('secret-2', 'b')")
    async with shop.captured(**MASKED) as fetcher:
        await shop.others_continue()
        await eventually(names(fetcher, "main.people", "mask_columns"), 20)
        with pytest.raises(AssertionError, match="the status names tables that cannot be captured"):
            await dump(shop.folder, "main.people")
        shop.execute("UPDATE people SET note = 'c'")
        await shop.others_continue()
        assert list(suspended(fetcher)) == ["main.people"]
    async with shop.captured(**HASHED) as fetcher:
        shop.execute("INSERT INTO people VALUES ('secret-3', 'd')")
        await shop.others_continue()
        assert not shop.table("main.people"), "no dump has read all of it"
        await eventually(names(fetcher, "main.people", "mask_columns"), 20)
        await dump(shop.folder, "main.people")
        shop.execute("INSERT INTO people VALUES ('secret-4', 'e')")
        await shop.others_continue()
        notes = sorted(row["note"] for row in shop.table("main.people").values())
        assert notes == ["c", "c", "d", "e"]
        await eventually(lambda: not suspended(fetcher), 20)
        await eventually(lambda: "main.people" not in stored_resume_state(fetcher), 20)
    assert b"secret" not in shop.written()


async def test_an_altered_table_that_a_rule_no_longer_fits_is_followed_once_it_is_fixed_and_dumped(
    shop: Shop,
) -> None:
    shop.execute("CREATE TABLE part (id INTEGER PRIMARY KEY, name TEXT)")
    async with shop.captured(**CUT) as fetcher:
        shop.execute("INSERT INTO part VALUES (1, 'before')")
        await shop.others_continue()
        shop.execute("ALTER TABLE part ADD COLUMN code INTEGER")
        await shop.others_continue()
        shop.execute("INSERT INTO part VALUES (2, 'secret-2', 20)")
        await shop.others_continue()
        await eventually(names(fetcher, "main.part", "no text: INTEGER"), 20)
        await dump(shop.folder, "main.part", ends="failed")
        # Rows that the rules fit again are not whole before a dump reads all of them.
        shop.execute("ALTER TABLE part RENAME COLUMN code TO number")
        shop.execute("UPDATE part SET name = 'after' WHERE id = 1")
        await shop.others_continue()
        assert list(shop.table("main.part")) == [(1,)]
        assert shop.table("main.part")[(1,)]["name"] == "before"
        assert b"secret" not in shop.written()
        await dump(shop.folder, "main.part")
        shop.execute("INSERT INTO part VALUES (3, 'new', 30)")
        await shop.others_continue()
        assert shop.table("main.part") == {
            (1,): {"id": 1, "name": "after", "number": None},
            (2,): {"id": 2, "name": "secret-2", "number": 20},
            (3,): {"id": 3, "name": "new", "number": 30},
        }
        await eventually(lambda: not suspended(fetcher), 20)


async def test_a_table_made_while_the_relay_was_away_is_named_and_suspended_with_its_first_row(
    shop: Shop,
) -> None:
    async with shop.captured(**MASKED):
        await shop.others_continue()
    shop.execute("CREATE TABLE people (email TEXT PRIMARY KEY)")
    shop.execute("CREATE TABLE empty (email TEXT PRIMARY KEY)")
    async with shop.captured(**MASKED) as fetcher:

        def warned(start: str) -> list[str]:
            announced = fetcher.status.source.get("warnings") or []
            return [text for text in announced if text.startswith(start)]

        await eventually(lambda: warned("main.people cannot be captured: rule for main.people"), 20)
        shop.execute("INSERT INTO people VALUES ('secret-1')")
        shop.execute("DROP TABLE empty")
        await shop.others_continue()
        await eventually(names(fetcher, "main.people", "mask_columns"), 20)
        assert not warned("main.people cannot")
        # Its `t` event would have the definition that the rules do not fit.
        await eventually(names(fetcher, "main.empty", "mask_columns"), 20)
        assert not warned("main.empty cannot")
    assert b"secret" not in shop.written()


async def test_rules_that_were_changed_so_as_not_to_fit_are_refused_and_nothing_is_missed(
    shop: Shop,
) -> None:
    async with shop.captured(**MASKED) as fetcher:
        await shop.others_continue()
        await eventually(lambda: stored_resume_state(fetcher), 20)
    shop.execute("INSERT INTO item VALUES (100, 'written meanwhile')")
    wrong = shop.config(mask_columns={"*.id": "***"})
    async with capturing(wrong, shop.data_dir) as fetcher:
        assert "rule for main.item.id" in await failed_with(fetcher, "preflight_failed")
    async with shop.captured(**CUT):
        await shop.others_continue()
    assert {(1,), (2,), (100,)} == set(shop.table("main.item"))


async def test_a_suspended_table_stays_so_when_the_last_rule_is_gone_until_it_is_dumped(
    shop: Shop,
) -> None:
    async with shop.captured(**MASKED):
        shop.execute("CREATE TABLE people (email TEXT PRIMARY KEY)")
        await shop.others_continue()
        shop.execute("INSERT INTO people VALUES ('a')")
        await shop.others_continue()
    for _ in range(2):
        async with shop.captured() as fetcher:
            await eventually(names(fetcher, "main.people", "mask_columns"), 20)
            shop.execute("DELETE FROM people")
            shop.execute("INSERT INTO people VALUES ('b')")
            await shop.others_continue()
            assert not shop.table("main.people")
    async with shop.captured() as fetcher:
        await dump(shop.folder, "main.people")
        shop.execute("INSERT INTO people VALUES ('c')")
        await shop.others_continue()
        assert set(shop.table("main.people")) == {("b",), ("c",)}
        await eventually(lambda: not is_ruled(stored_resume_state(fetcher)), 20)
    async with shop.captured() as fetcher:
        await shop.others_continue()
        await eventually(lambda: fetcher.status.source, 20)
        assert not suspended(fetcher)


# -- the source with rules over a stream that the test writes


class Written:
    """A source whose batches and tables the test gives."""

    def __init__(self, *batches: Batch) -> None:
        self.batches: asyncio.Queue[Batch | None] = asyncio.Queue()
        self.tables = [OTHER]
        self.announced: list[str] = []
        self.chunk_error: UnsupportedChange | None = None
        for batch in batches:
            self.batches.put_nowait(batch)

    def restore(self, resume_state: str, last: object, after_scn: int) -> None:
        self.announced.append(resume_state)

    async def preflight(self) -> list[Finding]:
        return []

    async def open(self) -> None:
        pass

    async def schemas(self) -> list[SourceSchema]:
        return self.tables

    async def stream(self, after_scn: int) -> AsyncIterator[Batch]:
        while batch := await self.batches.get():
            yield batch

    async def largest_key(self, source: str) -> list[Any]:
        return [7]

    async def table_size(self, source: str) -> TableSize:
        return TableSize()

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        assert self.chunk_error is not None
        raise self.chunk_error

    async def committed_scn(self) -> int:
        return 0

    async def status(self) -> dict[str, Any]:
        return {"warnings": ["its own"], "stopped_tables": {}}


def source_config(**rules: Any) -> DatabaseConfig:
    values = {"name": "shop", "url": "sqlite:///x"} | (rules or MASKED)
    return DatabaseConfig.model_validate(values)


def ruled(inner: Written, **rules: Any) -> RuledSource:
    return RuledSource(cast("Source", inner), source_config(**rules))


def window(scn: int, *schemas: SourceSchema, announced: SourceSchema | None = None) -> bytes:
    """A transaction with a row of each of the schemas, after a definition if one is announced."""
    builder = WindowBuilder(scn, scn)
    if announced is not None:
        text = json.dumps(announced.to_json()).encode()
        builder.control(
            Op.SCHEMA_CHANGE,
            source=announced.source_id,
            schema_fp=announced.fingerprint,
            after=text,
        )
    for schema in schemas:
        row = {"id": scn, "email": f"secret-{scn}"}
        values = [row[column.name] for column in schema.columns]
        builder.event(
            Op.INSERT, schema.source_id, schema.fingerprint,
            schema.encode_key([row[name] for name in schema.key]), after=schema.encode_row(values),
        )  # fmt: skip
    return builder.end(f"tx{scn}")


def announced_in(batch: Batch) -> list[tuple[int, int, int]]:
    """(scn, seq, source) of the rows that leave."""
    return [
        (view.scn, view.seq, view.source_id)
        for view in frame_format.iter_frames(batch.data)
        if not view.is_control
    ]


async def all_of(source: RuledSource, inner: Written, after_scn: int = 0) -> list[Batch]:
    inner.batches.put_nowait(None)
    return [batch async for batch in source.stream(after_scn)]


async def test_a_suspension_is_stored_before_its_window_continues() -> None:
    early, late = (
        SuspensionState({"a.b": TableSuspension(1, "early")}),
        SuspensionState({"a.b": TableSuspension(2, "late")}),
    )
    inner = Written(
        Batch(window(1, OTHER), (OTHER,), 1, resume_state=early),
        Batch(window(2, OTHER, UNFIT, OTHER, FIT), (UNFIT, FIT), 2, resume_state=late),
        Batch(window(3, FIT, OTHER), resolved=3),
    )
    first, persisted, second, third = await all_of(ruled(inner), inner)
    assert announced_in(first) == [(1, 0, OTHER.source_id)]
    resume_state = decode_ruled(persisted.resume_state.encode() if persisted.resume_state else "")
    assert (persisted.persist_first, persisted.data, persisted.resolved) == (True, b"", 0)
    assert (
        resume_state.text == early.encode() and resume_state.suspended["shop.people"].since_scn == 2
    )
    # A window's frames keep their positions, and its end its count.
    assert announced_in(second) == [(2, 0, OTHER.source_id), (2, 2, OTHER.source_id)]
    assert list(frame_format.iter_frames(second.data))[-1].event_count == 4
    assert second.schemas and UNFIT not in second.schemas and not second.persist_first
    assert (
        decode_ruled(second.resume_state.encode() if second.resume_state else "").text
        == late.encode()
    )
    assert announced_in(third) == [(3, 1, OTHER.source_id)]
    assert b"secret" not in b"".join(batch.data for batch in (first, second, third))


async def test_a_definition_that_does_not_fit_suspends_its_table_and_is_not_announced() -> None:
    inner = Written(
        Batch(window(1, FIT), (FIT,), 1),
        Batch(window(2, OTHER, announced=UNFIT), (OTHER,), 2),
        Batch(window(3, FIT, announced=replace(FIT, key=("id",))), resolved=3),
        Batch(window(4, announced=replace(FIT, columns=FIT.columns[:1])), resolved=4),
    )
    source = ruled(inner)
    batches = await all_of(source, inner)
    assert [announced_in(batch) for batch in batches] == [
        [(1, 0, FIT.source_id)], [], [(2, 1, OTHER.source_id)], [], [],
    ]  # fmt: skip
    ops = [[view.op for view in frame_format.iter_frames(batch.data)] for batch in batches[2:]]
    assert ops == [
        [Op.INSERT, Op.END_OF_WINDOW],
        [Op.SCHEMA_CHANGE, Op.END_OF_WINDOW],
        [Op.SCHEMA_CHANGE, Op.END_OF_WINDOW],
    ]
    # What consumers do not have yet comes with the frame, so that the table can be dumped.
    assert [schema.source for schema in batches[-1].schemas] == ["shop.people"]
    status = await source.status()
    assert status["stopped_tables"]["shop.people"]["since_scn"] == 2
    assert [text.split()[0] for text in status["warnings"]] == ["shop.people", "its"]


async def test_a_table_restarts_between_two_windows_and_that_is_stored_at_once() -> None:
    inner = Written()
    source = ruled(inner)
    source.restore(
        RuledResumeState(
            ColumnRules(source_config()).digest, {"shop.people": TableSuspension(3, "why")}
        ).encode(),
        None,
        8,
    )
    stream = source.stream(8)
    whole = window(9, OTHER, FIT, OTHER)
    cut = next(frame_format.iter_frames(whole)).length
    inner.batches.put_nowait(Batch(whole[:cut], (OTHER, FIT)))
    assert announced_in(await anext(stream)) == [(9, 0, OTHER.source_id)]
    inner.tables = [UNFIT]
    with pytest.raises(UnsupportedChange, match="mask_columns"):
        await source.largest_key("shop.people")
    inner.tables = [FIT]
    largest = asyncio.create_task(source.largest_key("shop.people"))
    await eventually(lambda: source._unfit.tables.has_requests, 5)
    inner.batches.put_nowait(Batch(whole[cut:], resolved=9))
    assert announced_in(await anext(stream)) == [(9, 2, OTHER.source_id)]
    inner.batches.put_nowait(Batch(window(10, FIT), resolved=10))
    persisted = await anext(stream)
    assert persisted.persist_first and not persisted.data and persisted.resume_state is not None
    assert not decode_ruled(persisted.resume_state.encode()).suspended
    assert announced_in(await anext(stream)) == [(10, 0, FIT.source_id)]
    assert await largest == [7]
    # No dump could read all of it: it has not been whole since it was suspended first.
    inner.chunk_error = UnsupportedChange("cannot be read", source="shop.people")
    with pytest.raises(UnsupportedChange):
        await source.read_chunk(ChunkRequest("shop.people", 10))
    inner.batches.put_nowait(Batch(window(11, FIT), resolved=11))
    persisted, then = await anext(stream), await anext(stream)
    assert persisted.persist_first and announced_in(then) == []
    assert (await source.status())["stopped_tables"]["shop.people"]["since_scn"] == 3
    await stream.aclose()


async def test_no_read_of_a_table_that_the_rules_do_not_fit_is_answered() -> None:
    inner = Written()
    source = ruled(inner)
    inner.tables = [UNFIT]
    assert await source.schemas() == []
    with pytest.raises(UnsupportedChange, match="mask_columns"):
        await source.largest_key("shop.people")
    with pytest.raises(UnsupportedChange, match="mask_columns"):
        await source.chunk_end(ChunkRequest("shop.people", 10))


@pytest.mark.parametrize(("rules", "refused"), [(MASKED, False), (CUT | MASKED, True)])
async def test_a_table_is_left_out_only_by_a_source_that_resumes_under_the_same_rules(
    rules: dict[str, Any], refused: bool
) -> None:
    digest = ColumnRules(source_config()).digest
    inner = Written()
    inner.tables = [OTHER, UNFIT]
    source = ruled(inner, **rules)
    with pytest.raises(PreflightFailed, match="rule for shop"):
        await source.open()
    source.restore(RuledResumeState(digest, text="what it stored").encode(), None, 5)
    assert inner.announced == ["what it stored"]
    if refused:
        with pytest.raises(PreflightFailed, match="rule for shop"):
            await source.open()
    else:
        await source.open()
    # A suspended one is known, whatever the rules.
    source.restore(
        RuledResumeState(digest, {"shop.people": TableSuspension(9, "why")}).encode(), None, 5
    )
    await source.open()
    assert (await source.status())["stopped_tables"]["shop.people"]["since_scn"] == 5


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.lists(st.sampled_from("oufc"), max_size=4), min_size=1, max_size=5),
    cuts=st.sets(st.integers(0, 30), max_size=6),
)
def test_a_table_is_suspended_at_the_same_position_however_the_stream_is_cut(
    kinds: list[list[str]], cuts: set[int]
) -> None:
    schemas = {"o": OTHER, "u": UNFIT, "f": FIT, "c": replace(OTHER, source="shop.calm")}
    data = b"".join(
        window(scn, *(schemas[kind] for kind in row)) for scn, row in enumerate(kinds, 1)
    )
    offsets = [view.offset for view in frame_format.iter_frames(data)]
    boundaries = sorted({offsets[cut % len(offsets)] for cut in cuts} | {0, len(data)})
    tables = UnfitTables("shop", ColumnRules(source_config()))
    found = b"".join(
        tables.sift(Batch(data[start:stop], tuple(schemas.values()))).batch.data
        for start, stop in pairwise(boundaries)
    )
    flat = [(scn, kind) for scn, row in enumerate(kinds, 1) for kind in row]
    since = next((at for at, (_, kind) in enumerate(flat) if kind == "u"), len(flat))
    wanted = [
        (scn, schemas[kind].fingerprint)
        for at, (scn, kind) in enumerate(flat)
        if kind in "oc" or (kind == "f" and at < since)
    ]
    rows = list(frame_format.iter_frames(found))
    assert [(v.scn, v.schema_fp) for v in rows if not v.is_control] == wanted
    assert [v.scn for v in rows if v.op == Op.END_OF_WINDOW] == list(range(1, len(kinds) + 1))
    assert list(tables.tables.suspensions) == (["shop.people"] if since < len(flat) else [])


def test_a_resume_state_of_a_source_without_rules_is_its_own() -> None:
    resume_state = RuledResumeState("", {}, SuspensionState())
    assert resume_state.encode() == SuspensionState().encode() and not is_ruled(
        resume_state.encode()
    )
    assert decode_ruled("anything") == RuledResumeState(text="anything")
    persisted = RuledResumeState("abc", {"a.b": TableSuspension(1, "why")}, SuspensionState())
    assert decode_ruled(persisted.encode()) == replace(
        persisted, inner=None, text=SuspensionState().encode()
    )
    for damaged in ('{"ruled"', '{"ruled": 1}', '{"ruled": {"by": "", "tables": "x"}}'):
        with pytest.raises(FormatError, match=r"no state of"):
            decode_ruled(damaged)
