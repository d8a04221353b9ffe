"""Two definitions of a table, compared; the real server's are in the integration tests."""

from __future__ import annotations

import json
from typing import Any

from databus.relay.sources.postgres.stream.postgres_lineage import (
    PostgresResumeState,
    decode_resume_state,
)
from databus.relay.sources.postgres.tables.postgres_tables import PostgresTable
from databus.relay.sources.postgres.tables.publications import PublishedTable, PublishedTables
from databus.relay.sources.postgres.tables.table_definitions import (
    Definition,
    DefinitionGap,
    change_between,
    stored_definition,
)

INT, TEXT, VARCHAR = 23, 25, 1043
KEY = [1, "id", INT, "700", False, False, None]


def definition(*columns: list[Any], file: int = 1, **others: Any) -> Definition:
    return Definition(json.dumps([KEY, *columns]), (1,), {9: file}, **others)


def column(type_oid: int = INT, version: str = "700", **others: Any) -> list[Any]:
    return [
        others.get("number", 2), others.get("name", "v"), type_oid, version, False,
        others.get("is_missing", False), others.get("default"),
    ]  # fmt: skip


def gap(known: Definition, now: Definition) -> DefinitionGap | None:
    return change_between(known, now)


def test_neither_a_new_file_nor_a_new_catalogue_row_alone_is_a_change_of_rows() -> None:
    known = definition(column())
    assert gap(known, definition(column(), file=2)) is None
    assert gap(known, definition(column(version="701"))) is None
    both = gap(known, definition(column(version="701"), file=2))
    assert both is not None
    assert both.rows_remain


def test_a_value_that_moves_from_the_catalogue_into_the_rows_stays_the_same() -> None:
    known = definition(column(is_missing=True, default=50))
    assert gap(known, definition(column(version="701", default=50), file=2)) is None
    # An altered type writes the default again; without one, nothing distinguishes the two.
    assert gap(known, definition(column(version="701", default=51), file=2)) is not None
    known = definition(column(is_missing=True))
    assert gap(known, definition(column(version="701"), file=2)) is not None


def test_texts_are_equal_in_either_type_as_long_as_nothing_is_written() -> None:
    known = definition(column(VARCHAR))
    assert gap(known, definition(column(TEXT, "701"))) is None
    assert gap(known, definition(column(TEXT, "701"), file=2)) is not None
    assert gap(known, definition(column(INT, "701"))) is not None


def test_labels_may_be_added_and_members_may_not() -> None:
    def typed(**types: Any) -> Definition:
        return definition(column(20_000), types=json.dumps(types))

    moods = {"1": "700", "2": "700"}
    assert gap(typed(a=moods), typed(a={**moods, "3": "701"})) is None
    assert gap(typed(a=moods), typed(a={**moods, "2": "701"})) is not None
    assert gap(typed(a=moods), typed(b={"5": "701"})) is None
    assert gap(typed(a=[23, 25]), typed(a=[23, 25, 23])) is not None
    # Where no row has a member any more, a member's number stays.
    assert gap(typed(a=[23, 25]), typed(a=[23, 25, 0])) is not None


def test_a_truncated_partition_is_not_hidden_by_a_label_that_was_renamed_too() -> None:
    def parted(version: str, file: int) -> Definition:
        types = json.dumps({"a": {"1": version}})
        return definition(column(20_000), file=file, types=types, is_partitioned=True)

    assert gap(parted("700", 1), parted("700", 2)) is None  # The look at the publication sees it.
    for file, rows_remain in ((1, True), (2, False)):
        found = gap(parted("700", 1), parted("701", file))
        assert found is not None
        assert found.rows_remain is rows_remain


def test_rows_under_another_key_do_not_remain() -> None:
    known = definition(column())
    other = gap(known, Definition(known.columns, (2,), known.files))
    assert other == DefinitionGap("its key was (id) and is (v)", rows_remain=False)
    retyped = Definition(json.dumps([[1, "id", TEXT, "701", False, False, None]]), (1,), {9: 2})
    found = gap(definition(), retyped)
    assert found is not None
    assert not found.rows_remain


def test_the_resume_state_has_definitions_and_one_of_an_earlier_version_has_none() -> None:
    published = PublishedTable(
        9, "1.2/3.4", {10: 11}, definition(column(), filled='["v"]', types="{}")
    )
    resume_state = PostgresResumeState(1, published=PublishedTables({"public.t": published}))
    assert decode_resume_state(resume_state.encode()) == resume_state
    document = json.loads(resume_state.encode())
    document["given"]["public.t"] = document["given"]["public.t"][:3]
    (earlier,) = (decode_resume_state(json.dumps(document)).published.tables or {}).values()
    assert earlier == PublishedTable(9, "1.2/3.4", {10: 11})


def test_the_resume_state_of_an_earlier_version_does_not_show_whether_a_table_was_renamed() -> None:
    *earlier, naming, _, _ = definition(column(), naming="800").to_json()
    assert naming == "800"
    known = stored_definition(earlier)
    assert not known.is_renamed(definition(column(), naming="801"))
    assert definition(column(), naming="800").is_renamed(definition(column(), naming="801"))
    assert change_between(known, definition(column(), naming="801")) is None


def test_a_definition_that_the_stream_meets_leaves_the_name_to_the_next_look() -> None:
    table = PostgresTable(9, "public.t", "public", "t", "d", (), ("id",), (), True, True)
    published = PublishedTables(
        {"public.t": PublishedTable(9, "1.2/", {}, definition(column(), naming="800"))}
    )
    later = definition(column(TEXT), naming="801")
    known = (published.redefined(table, later).tables or {})["public.t"].definition
    assert known is not None and known.columns == later.columns
    assert known.is_renamed(later)


def test_alter_table_moves_rows_and_vacuum_full_leaves_the_table_of_large_values() -> None:
    known = definition(column(), toast=5, horizon=70)
    assert not known.is_moved(definition(column(), toast=5, file=2))
    assert known.is_moved(definition(column(), toast=6, file=2))
    assert not known.is_moved(definition(column(), toast=6))
    bare = definition(column())
    assert bare.is_moved(definition(column(), file=2))  # Its rows have to be looked at.


def test_the_resume_state_has_since_when_a_file_is_known_which_is_no_other_definition() -> None:
    known = definition(column(), toast=5, horizon=70)
    stored = stored_definition(json.loads(json.dumps(known.to_json())))
    assert (stored, stored.horizon) == (known, 70)
    assert known == definition(column(), toast=5, horizon=71)
