"""What an endpoint needs, what a principal may do, and the part of an answer that it may get.

Pure: nothing here knows tokens, certificates or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from databus.common.errors import Forbidden
from databus.common.filters.stream_filter import StreamFilter, matches

WILD = frozenset("*?[")


class EndpointAction(StrEnum):
    """What is done at an endpoint."""

    READ = "read"
    """Streams, registration, bootstrap, changes, snapshots."""
    REPLICATE = "replicate"
    """Chunks of rows for a comparison, and the release of a blocking ring."""
    DUMP = "dump"
    """Start, change, cancel and list dumps."""
    ADMIN = "admin"
    """Resynchronise and claim tables."""
    MONITOR = "monitor"
    """Status and metrics of the whole server."""


class Scope(StrEnum):
    """How far an endpoint reaches, and so what a grant must cover."""

    OPEN = "open"
    """No authentication: health alone."""
    ANYONE = "anyone"
    """Any principal: nothing of a database is in the answer."""
    SERVER = "server"
    """All databases, whole."""
    DATABASES = "databases"
    """The answer lists the granted databases."""
    DATABASE = "database"
    """One database, whole."""
    SOURCES = "sources"
    """The granted sources of one database, with all of their columns."""
    COLUMNS = "columns"
    """The granted columns of the granted sources of one database."""


@dataclass(frozen=True, slots=True)
class Need:
    """What an endpoint needs."""

    scope: Scope
    action: EndpointAction | None = None


OPEN = Need(Scope.OPEN)
ANYONE = Need(Scope.ANYONE)


@dataclass(frozen=True, slots=True)
class Access:
    """What one request may get; the empty value is everything.

    ``databases`` and ``sources`` are globs, ``columns`` names; None stands for all of them.
    """

    databases: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    columns: frozenset[str] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of a database is left out."""
        return self.sources is None and self.columns is None

    def has_database(self, name: str) -> bool:
        """Whether a list of databases has this one."""
        return self.databases is None or matches(name, self.databases)

    def has_source(self, name: str) -> bool:
        """Whether a list of sources has this one."""
        return self.sources is None or matches(name, self.sources)

    def check_sources(self, patterns: Iterable[str], *, may_expand: bool = True) -> None:
        """Refuse names that are not granted.

        A pattern is fine if the answer can be narrowed, as a stream's; otherwise
        (``may_expand`` is False) only a pattern that is granted as it stands.

        Raises:
            Forbidden: the message has only the name that was requested.
        """
        if self.sources is None:
            return
        for pattern in patterns:
            is_name = not set(pattern) & WILD
            if pattern in self.sources or (is_name and matches(pattern, self.sources)):
                continue
            if is_name or not may_expand:
                raise Forbidden(f"the source {pattern!r} is not granted", source=pattern)

    def check_columns(self, names: Iterable[str]) -> None:
        """Refuse columns that are not granted.

        Raises:
            Forbidden: the message has only the name that was requested.
        """
        for name in sorted(names) if self.columns is not None else ():
            if self.columns is not None and name not in self.columns:
                raise Forbidden(f"the column {name!r} is not granted", column=name)

    def narrow(self, stream_filter: StreamFilter) -> StreamFilter:
        """The filter with the granted sources alone.

        Raises:
            Forbidden: it names a source that is not granted.
        """
        if self.sources is None:
            return stream_filter
        self.check_sources(stream_filter.sources)
        return replace(stream_filter, granted=self.sources)


EVERYTHING = Access()


@dataclass(frozen=True, slots=True)
class Grant:
    """Actions on a part of the databases; ``columns`` None is all columns."""

    actions: frozenset[EndpointAction]
    databases: tuple[str, ...] = ("*",)
    sources: tuple[str, ...] = ("*",)
    columns: frozenset[str] | None = None


def access_of(grants: Iterable[Grant], need: Need, database: str | None, who: str) -> Access:
    """What a request may get.

    Several grants give the union of their sources, and the columns that all of them have: one
    answer has the same columns for all of its sources.

    Raises:
        Forbidden: no grant covers it.
    """
    if need.action is None:
        return EVERYTHING
    found = [
        grant
        for grant in grants
        if need.action in grant.actions and (database is None or matches(database, grant.databases))
    ]
    where = "" if database is None else f" of the database {database!r}"
    if not found:
        raise Forbidden(f"{who} has no grant for the action {need.action}{where}")
    access = Access(_all_of(g.databases for g in found), _all_of(g.sources for g in found), None)
    limits = [grant.columns for grant in found if grant.columns is not None]
    if limits:
        access = replace(access, columns=frozenset.intersection(*limits))
    if need.scope is Scope.SERVER and not (access.databases is None and access.is_whole):
        raise Forbidden(f"{who} needs a grant for the action {need.action} on all databases")
    if need.scope is Scope.DATABASE and not access.is_whole:
        raise Forbidden(f"{who} needs a grant for the action {need.action} on all sources{where}")
    if need.scope is Scope.SOURCES and access.columns is not None:
        raise Forbidden(f"{who} needs a grant for the action {need.action} on all columns{where}")
    return access


def _all_of(patterns: Iterable[tuple[str, ...]]) -> tuple[str, ...] | None:
    joined = tuple(dict.fromkeys(one for some in patterns for one in some))
    return None if "*" in joined else joined
