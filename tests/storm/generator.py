"""Decides which session sends what next, from nothing but a seed and the server's catalogue."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from tests.storm import script
from tests.storm.case import SESSIONS
from tests.storm.script import Step
from tests.storm.servers import number
from tests.storm.site import Column, Site, TableFacts
from tests.storm.spelling import Dialect, Modes, respell

CHECK_EVERY = 12
FILL = "first rows"
_LEAVE_TABLES = (
    "INSERT", "UPDATE", "DELETE", "REPLACE", "TRUNCATE", "BEGIN", "START",
    "SAVEPOINT", "SET", "XA", "RELEASE", "PREPARE ", "EXECUTE `", "LOCK", "UNLOCK", "LOAD",
)  # fmt: skip
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Production:
    """A rule of a grammar: its name, how likely it is, and what servers have it."""

    name: str
    weight: float
    only: str
    since: tuple[int, ...]


_RULES: dict[Callable[..., Any], Production] = {}
"""The rule of each marked method."""


def production(
    weight: float = 1.0, *, only: str = "", since: tuple[int, ...] = ()
) -> Callable[[_F], _F]:
    """Marks a method that gives the statements of one rule, or none where it does not apply.

    ``only`` names the products that have it; "" means all of the grammar.  ``since`` is the
    first version.
    """

    def mark(method: _F) -> _F:
        name = method.__name__.removeprefix("p_").replace("_", " ")
        _RULES[method] = Production(name, weight, only, since)
        return method

    return mark


class Grammar(ABC):
    """What one kind of server can be sent.

    Owner: the generator.  ``session`` is the one that the production is for.
    """

    dialect: ClassVar[Dialect] = Dialect()
    plain_modes: ClassVar[Modes] = Modes()
    stays: ClassVar[float] = 0.7
    """How likely the session of the last statement sends the next one of its production too."""

    def __init__(self, rng: random.Random, site: Site) -> None:
        self.rng, self.site = rng, site
        self.session = 0
        self.modes: dict[int, Modes] = {}
        self.number = 0
        self._tables: list[TableFacts] | None = None
        self.productions: list[tuple[Production, Callable[[], Iterable[str]]]] = []
        for name in dir(type(self)):
            if name.startswith("p_"):
                method, rule = getattr(self, name), _RULES[getattr(type(self), name)]
                is_of = not rule.only or site.product in rule.only.split()
                if is_of and self.has(*rule.since):
                    self.productions.append((rule, method))
        self._weights = [rule.weight for rule, _ in self.productions]

    def leave_out(self, names: set[str]) -> None:
        """Never choose these productions."""
        self.productions = [(rule, how) for rule, how in self.productions if rule.name not in names]
        self._weights = [rule.weight for rule, _ in self.productions]

    @abstractmethod
    def first(self) -> list[str]:
        """The tables with which a case begins."""

    def choose(self) -> tuple[str, list[str]]:
        """A production and its statements; none where it does not apply now."""
        rule, method = self.rng.choices(self.productions, self._weights)[0]
        return rule.name, list(method() or ())

    def altered(self) -> None:
        """Something was sent that may have altered tables."""
        self._tables = None

    def forget_sessions(self) -> None:
        """The server was restarted: sessions have their first settings."""
        self.modes.clear()
        self.altered()

    # -- for productions

    @property
    def tables(self) -> list[TableFacts]:
        """Tables and views that there are."""
        if self._tables is None:
            self._tables = self.site.tables()
        return self._tables

    def base_tables(self, *, captured: bool | None = None) -> list[TableFacts]:
        return [
            table
            for table in self.tables
            if table.kind == "table"
            and (captured is None or self.site.is_captured(table.schema) is captured)
        ]

    def some_table(self, *, with_key: bool = False) -> TableFacts | None:
        """A table with a column that can be written; ``with_key``: and with a key."""
        found = [t for t in self.base_tables() if self.columns(t) and (t.key or not with_key)]
        captured = [t for t in found if self.site.is_captured(t.schema)]
        if captured and self.chance(0.9):
            found = captured
        return self.rng.choice(found) if found else None

    def has(self, *since: int) -> bool:
        """Whether the server is of this version or a later one."""
        return number(self.site.version) >= since

    def chance(self, of: float) -> bool:
        return self.rng.random() < of

    def pick(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def columns(self, table: TableFacts, *, key: bool | None = None) -> list[Column]:
        return [
            column
            for column in table.columns
            if not column.generated and (key is None or column.is_key is key)
        ]


class Generator:
    """The next step, endlessly.

    Invariants:
        I1. Equal seeds over equal servers give equal steps.
    """

    def __init__(self, rng: random.Random, grammar: Grammar, *, restarts: bool) -> None:
        self._rng, self._grammar = rng, grammar
        self._restarts = restarts
        self._queues: list[deque[tuple[str, str]]] = [deque() for _ in range(SESSIONS)]
        self._queues[0].extend((_first(sql), sql) for sql in grammar.first())
        self._count = self._last = 0

    def next(self) -> Step:
        """A statement, a comparison, or a restart."""
        self._count += 1
        is_set_up = self._queues[0] and self._queues[0][0][0] in (script.SET_UP, FILL)
        if not is_set_up:
            if self._count % CHECK_EVERY == 0:
                return script.check()
            if (action := self._action()) is not None:
                return action
        session = 0 if is_set_up else self._some_session()
        queue, grammar = self._queues[session], self._grammar
        grammar.session = session
        while not queue:
            name, statements = grammar.choose()
            queue.extend((name, sql) for sql in statements)
        name, sql = queue.popleft()
        modes = grammar.modes.get(session, grammar.plain_modes)
        if not sql.lstrip().upper().startswith(_LEAVE_TABLES):
            grammar.altered()
        if sql.startswith("-- "):
            return Step(session, sql, name)  # It is no SQL.
        return Step(session, respell(self._rng, sql, grammar.dialect, modes), name)

    def _some_session(self) -> int:
        """Mostly the one of the last statement, so that a transaction holds its locks shortly."""
        if not (self._queues[self._last] and self._rng.random() < self._grammar.stays):
            self._last = self._rng.randrange(SESSIONS)
        return self._last

    def _action(self) -> Step | None:
        chance = self._rng.random()
        if chance < 0.004:
            return Step(-1, script.RESTART_RELAY, script.RESTART_RELAY)
        if chance < 0.012 and self._count > 20:
            return Step(-1, script.START_LATE, script.START_LATE)
        if chance < 0.03:
            action = script.START_BOOTSTRAP
            if chance > 0.026:
                action = script.MERGE if chance > 0.028 else script.RESTART_BOOTSTRAP
            return Step(-1, action, action)
        if self._restarts and chance < 0.0315:
            action = self._rng.choice((script.RESTART_SERVER, script.KILL_SERVER))
            self._grammar.forget_sessions()
            return Step(-1, action, action)
        if self._grammar.site.has_binlog and 0.0315 < chance < 0.032:
            return Step(-1, script.RESET_LOGS, script.RESET_LOGS)
        return None


def _first(sql: str) -> str:
    return script.SET_UP if sql.startswith("CREATE") else FILL
