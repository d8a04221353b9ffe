"""Where the rows of a source go: targets by pattern, columns, ``where``, a function over rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from databus.common.errors import ConfigError, RowRefused
from databus.common.filters.stream_filter import matches
from databus.common.schema.source_names import split_source

if TYPE_CHECKING:
    from databus.client.sinks.route_filter import RouteFilter
    from databus.client.sinks.sink_batch import SinkRow
    from databus.common.sink_config import RouteConfig

Transform = Callable[["SinkRow"], "SinkRow | None"]
_FIELDS = "{database}, {source}, {schema}, {table}"


@dataclass(frozen=True, slots=True)
class Route:
    """The target of one source, the columns that go there (empty for all), and the rows."""

    target: str
    columns: frozenset[str] = frozenset()
    where: RouteFilter | None = None


class SinkRoutes:
    """Finds the route of a source: the first whose pattern matches.

    Without any route every source goes to ``default_target``.  With routes, a source that none of
    them names is left out.

    Raises: ConfigError for a target that is not a template over database, source, schema, table.
    """

    def __init__(
        self,
        database: str,
        routes: Sequence[RouteConfig] = (),
        *,
        default_target: str = "{source}",
        transform: Transform | None = None,
    ) -> None:
        self._database = database
        self._rules = [(route.source, _route_of(route, default_target)) for route in routes] or [
            ("*", Route(default_target))
        ]
        self._transform = transform
        self._found: dict[str, Route | None] = {}
        for _, route in self._rules:
            _filled(route.target, database, "schema.table")

    def of(self, source: str) -> Route | None:
        """The route of a source; None if it is left out."""
        if source not in self._found:
            self._found[source] = next(
                (
                    replace(route, target=_filled(route.target, self._database, source))
                    for pattern, route in self._rules
                    if matches(source, (pattern,))
                ),
                None,
            )
        return self._found[source]

    def changes_rows(self, route: Route) -> bool:
        """Whether ``row`` may give other rows than it receives."""
        return route.where is not None or self._transform is not None

    def row(self, route: Route, row: SinkRow) -> SinkRow | None:
        """The row after ``where`` of its route and the transform; None if it is left out.

        Raises:
            RowRefused: ``where`` cannot be decided, or the transform failed.
        """
        found = row if route.where is None else route.where.row(row)
        if found is None or self._transform is None:
            return found
        try:
            return self._transform(found)
        except Exception as error:
            raise RowRefused(f"the transform failed for {found!r}: {error!r}") from error


def _route_of(config: RouteConfig, default_target: str) -> Route:
    where = None
    if config.where:
        from databus.client.sinks.route_filter import RouteFilter

        where = RouteFilter(config.where)
    return Route(config.target or default_target, frozenset(config.columns), where)


def load_transform(name: str) -> Transform:
    """The function that ``module:function`` names.

    Raises:
        ConfigError: there is no such function.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"transform = {name!r} is not module:function: {error}") from error
    if not callable(found):
        raise ConfigError(f"transform = {name!r} is not a function")
    loaded: Transform = found
    return loaded


def _filled(template: str, database: str, source: str) -> str:
    schema, table = split_source(source)
    try:
        return template.format(database=database, source=source, schema=schema, table=table)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"the target {template!r} has a part that is none of {_FIELDS}: {error}"
        ) from None
