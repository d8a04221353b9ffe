"""What the storm needs of a kind of database: schemas to work in, sessions, and plain SELECTs."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar

from databus.common.config import DatabaseConfig
from databus.common.schema.source_names import join_source
from tests.storm.replica import Row


@dataclasses.dataclass(frozen=True)
class Column:
    """A column as the catalogue has it; ``is_logged``: the server's log has it."""

    name: str
    type: str
    nullable: bool = True
    generated: bool = False
    is_key: bool = False
    is_automatic: bool = False
    full_type: str = ""
    is_logged: bool = True


@dataclasses.dataclass(frozen=True)
class TableFacts:
    """A table, as the generator and the comparison need it."""

    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    engine: str = ""
    kind: str = "table"
    is_transactional: bool = True

    @property
    def source(self) -> str:
        return join_source(self.schema, self.name)


class Session(ABC):
    """A connection of an application."""

    @abstractmethod
    def execute(self, sql: str) -> None:
        """Send one statement and read everything that comes back."""

    @property
    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether something is open."""

    def unlock(self) -> None:  # noqa: B027  # most servers have locks in transactions alone
        """Release the tables that the session has locked."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""


class Site(ABC):
    """A server with nothing on it but the storm."""

    product: str
    mark: ClassVar[str]
    has_one_relay: ClassVar[bool] = False
    """Whether the database can be read by one relay at a time."""
    has_binlog: ClassVar[bool] = False
    version = ""

    @abstractmethod
    def fresh(self) -> None:
        """Leave nothing of the case before."""

    @abstractmethod
    def config(self, name: str) -> DatabaseConfig:
        """The ``[[database]]`` of the fetcher with this name."""

    @abstractmethod
    def session(self) -> Session:
        """Another connection."""

    @abstractmethod
    def put_mark(self) -> int | None:
        """Commit the next number in the marking table; None: a session is in the way."""

    @abstractmethod
    def tables(self) -> list[TableFacts]:
        """Every table and view that there is, captured or not."""

    @abstractmethod
    def rows(self, table: TableFacts) -> list[Row]:
        """SELECT all that is committed."""

    @abstractmethod
    def is_captured(self, schema: str) -> bool:
        """Whether the relay's sources have the tables of a schema in them."""

    @property
    def is_running(self) -> bool:
        """Whether the server's process is there."""
        return True

    def is_open(self) -> bool:
        """Whether a transaction is prepared that no session holds."""
        return False

    def is_undumped(self, table: TableFacts, why: str) -> bool:
        """Whether a table cannot be read, as the documentation says, and is named with that."""
        return False

    def is_refused(self, error: str) -> bool:
        """Whether a relay stops with this error because of what the case has taken from it."""
        return False

    def is_lost(self, code: str) -> bool:
        """Whether a relay must stop with an error of this code because of what the case did."""
        return False

    def settle(self) -> None:  # noqa: B027  # most servers have nothing to undo
        """Undo what a case has left altered for the relays."""

    def reset_logs(self) -> bool:
        """Have the server forget its binlog; False: it has none, or refuses to."""
        return False

    @abstractmethod
    def restart(self, *, kill: bool) -> None:
        """End the server, in order or with kill -9, and start it again."""

    @abstractmethod
    def close(self) -> None:
        """End the server."""
