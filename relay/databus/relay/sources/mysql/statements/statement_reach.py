"""Which tables a change of rows reaches besides the one that it names.

A view hands it on to its tables.  A trigger writes to others, a foreign key deletes and updates
children, a function that a statement calls may write, and a MERGE table has the rows of others.
Bodies of triggers and routines are not understood, only searched for names: a table that is named
in one counts as changed by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from databus.relay.sources.mysql.statements.lexer import (
    NotUnderstood,
    Token,
    TokenKind,
    tokens_of,
)
from databus.relay.sources.mysql.statements.token_reader import TableName, TokenReader


@dataclass(frozen=True, slots=True)
class RoutineBody:
    """The text of a view, a trigger or a routine, and where its names are looked up.

    ``text`` is None where the server does not show it.
    """

    schema: str
    text: str | None
    sql_mode: int = 0


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the server's catalogue says of what a change of rows reaches.

    ``children`` are tables that a foreign key with an action refers from, by the parent;
    ``merged`` the tables of a MERGE table, and the other way round.  ``unseen`` says what the
    account may not see; then every change of rows may reach every captured table.  ``moved`` has
    the names, in lower case, of tables and views that were renamed or dropped between the change
    and the reading of the catalogue: what belonged to them is listed elsewhere, or no more.
    """

    views: Mapping[TableName, RoutineBody] = field(default_factory=dict)
    triggers: Mapping[TableName, Sequence[RoutineBody]] = field(default_factory=dict)
    children: Mapping[TableName, frozenset[TableName]] = field(default_factory=dict)
    routines: Mapping[TableName, RoutineBody] = field(default_factory=dict)
    merged: Mapping[TableName, frozenset[TableName]] = field(default_factory=dict)
    unseen: str = ""
    moved: frozenset[str] = frozenset()
    is_mysql: bool = False
    folds_names: bool = False


NOTHING_KNOWN = Knowledge()


def reached(
    targets: Iterable[TableName],
    rest: Sequence[Token],
    knowledge: Knowledge,
    captured: Sequence[TableName],
) -> set[TableName]:
    """The tables that a change of rows can change.

    ``rest`` is the statement behind its targets, which may call functions.
    """
    search = _Search(knowledge)
    try:
        for target in targets:
            search.table(target)
        search.calls(rest)
        search.finish()
    except _CannotBeSeen:
        return set(captured) | search.found
    return set(captured) | search.found if knowledge.unseen else search.found


class _CannotBeSeen(Exception):
    """A body is not shown, cannot be lexed, or makes its statements while it runs; or a table or
    view has another name by now."""


class _Search:
    """Follows names until no new one is found.

    Owner: ``reached``.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._todo: list[TableName] = []
        self._bodies: set[RoutineBody] = set()
        self._routines = {name[1].lower() for name in knowledge.routines}
        self.found: set[TableName] = set()

    def table(self, name: TableName) -> None:
        """This table or view is changed."""
        if name not in self.found:
            self.found.add(name)
            self._todo.append(name)
            if name[1].lower() in self._knowledge.moved:
                raise _CannotBeSeen

    def calls(self, tokens: Sequence[Token]) -> None:
        """Functions among these tokens are called."""
        for token in tokens:
            if token.kind is not TokenKind.SIGN and token.text.lower() in self._routines:
                self._call(token.text.lower())

    def _call(self, name: str) -> None:
        for (_, routine), body in self._knowledge.routines.items():
            if routine.lower() == name:
                self._body(body)

    def _body(self, body: RoutineBody) -> None:
        if body in self._bodies:
            return
        self._bodies.add(body)
        if body.text is None:
            raise _CannotBeSeen
        try:
            tokens = tokens_of(body.text, body.sql_mode, is_mysql=self._knowledge.is_mysql)
        except NotUnderstood:
            raise _CannotBeSeen from None
        if any(token.keyword in ("EXECUTE", "PREPARE") for token in tokens):
            raise _CannotBeSeen
        reader = TokenReader(tokens, body.schema, folds=self._knowledge.folds_names)
        for name in reader.possible_tables():
            self.table(name)
        self.calls(tokens)

    def finish(self) -> None:
        """Follow all that was found."""
        knowledge = self._knowledge
        while self._todo:
            name = self._todo.pop()
            if name in knowledge.views:
                self._body(knowledge.views[name])
            for body in knowledge.triggers.get(name, ()):
                self._body(body)
            for other in (*knowledge.children.get(name, ()), *knowledge.merged.get(name, ())):
                self.table(other)
