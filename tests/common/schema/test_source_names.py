"""Names of sources: a dot within a part is not the dot between the parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.schema.source_names import join_source, split_source

PARTS = st.text(alphabet='ab."`*[ é', min_size=1)


@pytest.mark.parametrize(
    ("schema", "table", "name"),
    [
        ("shop", "orders", "shop.orders"),
        ("shop.eu", "t", '"shop.eu".t'),
        ("shop", "eu.t", 'shop."eu.t"'),
        ('a"b', "t", '"a""b".t'),
        ("a b", "t-1", "a b.t-1"),
        ('"a".b', ".", '"""a"".b"."."'),
    ],
)
def test_a_part_is_quoted_where_it_holds_a_dot_or_a_quote(
    schema: str, table: str, name: str
) -> None:
    assert join_source(schema, table) == name
    assert split_source(name) == (schema, table)


@given(PARTS, PARTS)
def test_every_name_is_split_into_what_it_was_made_of(schema: str, table: str) -> None:
    assert split_source(join_source(schema, table)) == (schema, table)


@pytest.mark.parametrize(
    ("glob", "parts"),
    [
        ("*", ("*", "")),
        ("shop.*", ("shop", "*")),
        ('"shop.eu".*', ("shop.eu", "*")),
        ('"shop.*', ('"shop', "*")),
        ('*".t', ('*"', "t")),
    ],
)
def test_a_glob_is_split_as_a_name_is(glob: str, parts: tuple[str, str]) -> None:
    assert split_source(glob) == parts
