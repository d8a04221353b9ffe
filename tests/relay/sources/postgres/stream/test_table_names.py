"""Which sources a change concerns that comes under some name."""

from __future__ import annotations

from databus.relay.sources.postgres.stream.table_names import TableNames


def named(known: dict[str, int], **described: int) -> TableNames:
    names = TableNames(known)
    for name, oid in described.items():
        names.describe(oid, name)
    return names


def test_a_change_under_the_name_that_is_known_concerns_no_other_source() -> None:
    names = named({"t": 100}, t=100)
    assert names.missed_by(100) == {}
    assert names.is_table_of("t", 100)


def test_a_change_under_another_name_concerns_the_table_and_a_name_that_no_look_has_found() -> None:
    assert named({"t": 100, "u": 7}, u=100).missed_by(100).keys() == {"t"}
    assert named({"t": 100}, u=100).missed_by(100).keys() == {"t", "u"}
    assert not named({"t": 100}, u=100).is_table_of("u", 100)


def test_a_table_that_no_look_has_found_is_met_by_the_next_one() -> None:
    names = named({}, x=200)
    assert names.missed_by(200).keys() == {"x"}
    assert not names.is_table_of("x", 200)
    assert names.add_found({"x": 200}) and not names.add_found({"x": 200})
    assert names.missed_by(200) == {}
    assert names.is_table_of("x", 200)


def test_a_look_gives_no_name_to_another_table_but_a_dump_does() -> None:
    names = named({"t": 100}, t=200)
    names.add_found({"t": 200})
    assert names.is_table_of("t", 100) and not names.is_table_of("t", 200)
    assert names.missed_by(200) == {}, "its rows were never requested"
    assert names.assign("t", 200) and not names.assign("t", 200)
    assert names.is_table_of("t", 200) and not names.is_table_of("t", 100)
    names.describe(100, "old")
    assert names.missed_by(100).keys() == {"old"}, "the source t is no longer this table"


def test_a_table_without_a_description_concerns_nothing() -> None:
    assert named({"t": 100}).missed_by(100) == {}


def test_without_what_a_look_has_found_every_name_means_its_table() -> None:
    names = TableNames()
    names.describe(200, "x")
    assert names.is_table_of("x", 200)
    assert names.missed_by(200) == {}
    names.assign("x", 300)
    assert not names.is_table_of("x", 200)
