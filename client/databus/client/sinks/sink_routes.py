"""Where the rows of a source go: targets by pattern, columns, and a function over each row."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from databus.common.errors import ConfigError
from databus.common.filters.stream_filter import matches
from databus.common.schema.source_names import split_source

if TYPE_CHECKING:
    from databus.client.sinks.sink_batch import SinkRow
    from databus.common.sink_config import RouteConfig

Transform = Callable[["SinkRow"], "SinkRow | None"]
_FIELDS = "{database}, {source}, {schema}, {table}"


@dataclass(frozen=True, slots=True)
class Route:
    """The target of one source, and the columns that go there; empty for all."""

    target: str
    columns: frozenset[str] = frozenset()


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
        self._rules = [
            ((route.source,), route.target or default_target, frozenset(route.columns))
            for route in routes
        ] or [(("*",), default_target, frozenset())]
        self.transform = transform
        self._found: dict[str, Route | None] = {}
        for _, template, _ in self._rules:
            _filled(template, database, "schema.table")

    def of(self, source: str) -> Route | None:
        """The route of a source; None if it is left out."""
        if source not in self._found:
            self._found[source] = next(
                (
                    Route(_filled(template, self._database, source), columns)
                    for patterns, template, columns in self._rules
                    if matches(source, patterns)
                ),
                None,
            )
        return self._found[source]


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
