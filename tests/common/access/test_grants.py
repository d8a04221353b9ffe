"""Which part of an answer a caller may get."""

from __future__ import annotations

import pytest

from databus.common.access.grants import Access, EndpointAction, Grant, Need, Scope, access_of
from databus.common.errors import Forbidden
from databus.common.filters.stream_filter import StreamFilter

READ = Need(Scope.COLUMNS, EndpointAction.READ)


def grant(*actions: EndpointAction, **part: object) -> Grant:
    return Grant(frozenset(actions), **part)  # type: ignore[arg-type]  # by name


def test_a_grant_is_of_an_action_and_a_database() -> None:
    grants = [grant(EndpointAction.READ, databases=("shop*",)), grant(EndpointAction.DUMP)]
    assert access_of(grants, READ, "shop_eu", "app").is_whole
    for need, database in ((READ, "hr"), (Need(Scope.DATABASE, EndpointAction.ADMIN), "shop_eu")):
        with pytest.raises(Forbidden, match=f"app has no grant for the action .* {database!r}"):
            access_of(grants, need, database, "app")
    assert access_of([], Need(Scope.ANYONE), None, "app").is_whole


def test_several_grants_give_all_of_their_sources_and_only_columns_that_all_of_them_have() -> None:
    grants = [
        grant(EndpointAction.READ, sources=("a.*",), columns=frozenset({"id", "name", "secret"})),
        grant(EndpointAction.READ, sources=("b.t",), columns=frozenset({"id", "name"})),
        grant(EndpointAction.DUMP, sources=("*",)),
    ]
    access = access_of(grants, READ, "shop", "app")
    assert access.sources == ("a.*", "b.t")
    assert access.columns == {"id", "name"}


@pytest.mark.parametrize(
    ("scope", "part"),
    [
        (Scope.SERVER, {"databases": ("shop",)}),
        (Scope.SERVER, {"sources": ("a.*",)}),
        (Scope.DATABASE, {"sources": ("a.*",)}),
        (Scope.DATABASE, {"columns": frozenset({"id"})}),
        (Scope.SOURCES, {"columns": frozenset({"id"})}),
    ],
)
def test_an_answer_that_cannot_be_narrowed_needs_a_grant_for_all_of_it(
    scope: Scope, part: dict[str, object]
) -> None:
    need = Need(scope, EndpointAction.READ)
    assert access_of([grant(EndpointAction.READ)], need, "shop", "app").is_whole
    with pytest.raises(Forbidden, match="needs a grant"):
        access_of([grant(EndpointAction.READ, **part)], need, "shop", "app")


def test_names_that_are_not_granted_are_refused_and_globs_are_narrowed() -> None:
    access = Access(sources=("a.*", "b.t"))
    narrowed = access.narrow(StreamFilter(sources=("a.x", "*.t")))
    assert [narrowed.takes_source(name) for name in ("a.x", "a.t", "a.y", "b.t", "c.t")] == [
        True, True, False, True, False,
    ]  # fmt: skip
    everything = access.narrow(StreamFilter())
    assert not everything.is_empty
    assert not everything.takes_every_source
    assert [everything.takes_source(name) for name in ("a.x", "b.t", "c.t")] == [True, True, False]
    assert not access.narrow(StreamFilter(sources=("*",))).takes_source("c.t")
    with pytest.raises(Forbidden, match=r"'c\.t' is not granted"):
        access.narrow(StreamFilter(sources=("a.x", "c.t")))
    for pattern in ("*", "a.x*", "?.t"):
        with pytest.raises(Forbidden):
            access.check_sources([pattern], may_expand=False)
    access.check_sources(["a.*", "a.x", "b.t"], may_expand=False)
    assert not Access(sources=()).narrow(StreamFilter()).takes_source("a.x")


def test_columns_that_are_not_granted_are_refused() -> None:
    Access().check_columns({"anything"})
    Access(columns=frozenset({"id"})).check_columns({"id"})
    with pytest.raises(Forbidden, match="'secret' is not granted"):
        Access(columns=frozenset({"id"})).check_columns({"id", "secret"})
