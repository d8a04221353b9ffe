"""Derives which tables a change of rows reaches besides the one that it names.

A change of a view changes its tables.  A trigger writes to other tables, a foreign key deletes and
updates children, a called function may write, and a MERGE table has the rows of other tables.
Bodies of triggers and routines are not parsed, only searched for names: a table that a body names
counts as changed by it.
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

    ``text`` is None if the server does not show it.
    """

    schema: str
    text: str | None
    sql_mode: int = 0


@dataclass(frozen=True, slots=True)
class Knowledge:
    """The parts of the server's catalogue that decide which tables a change of rows reaches.

    ``children``: by parent, the tables with a foreign key with an action.  ``merged``: by MERGE
    table its tables, and by each of these the MERGE table.  ``unseen`` names what the account
    cannot see; then every change of rows may reach every captured table.  ``moved`` has the names,
    in lower case, of tables and views that were renamed or dropped between the change and the read
    of the catalogue, which lists their triggers and keys under other names or not at all.
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

    ``rest`` is the statement after its targets, which may call functions.
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
    """A body is not visible, cannot be lexed, or has dynamic SQL; or a table or view was renamed
    since."""


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
        """Follow all names found so far."""
        knowledge = self._knowledge
        while self._todo:
            name = self._todo.pop()
            if name in knowledge.views:
                self._body(knowledge.views[name])
            for body in knowledge.triggers.get(name, ()):
                self._body(body)
            for other in (*knowledge.children.get(name, ()), *knowledge.merged.get(name, ())):
                self.table(other)
