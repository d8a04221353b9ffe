"""Which source serves which URL scheme.  Drivers are imported only when needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from databus.common.config import DatabaseConfig
from databus.common.errors import ConfigError
from databus.common.extras import imports_of_extra
from databus.relay.columns.column_rules import ColumnRules
from databus.relay.columns.ruled_source import RuledSource
from databus.relay.sources.contract import Source

_SOURCES = {
    "sqlite": ("databus.relay.sources.sqlite.sqlite_source", "SqliteSource"),
    "generator": ("databus.relay.sources.generator.generator_source", "GeneratorSource"),
    "mariadb": ("databus.relay.sources.mysql", "MySqlSource"),
    "mysql": ("databus.relay.sources.mysql", "MySqlSource"),
    "postgresql": ("databus.relay.sources.postgres", "PostgresSource"),
    "postgres": ("databus.relay.sources.postgres", "PostgresSource"),
    "relay+http": ("databus.relay.sources.chained.chained_source", "RelaySource"),
    "relay+https": ("databus.relay.sources.chained.chained_source", "RelaySource"),
}


def create_source(config: DatabaseConfig) -> Source:
    """The source for a database's URL, not opened yet; called with the database's config.

    Raises:
        ConfigError: no source serves the scheme.
        MissingDependency: its driver is not installed.
    """
    source = cast("Source", source_class(config)(config))
    if ColumnRules(config).is_empty:
        return source
    return cast("Source", RuledSource(source, config))


def source_class(config: DatabaseConfig) -> Callable[[DatabaseConfig], object]:
    """The class of the source for a database's URL; the first call imports its driver.

    Raises:
        ConfigError, MissingDependency: as ``create_source``.
    """
    scheme = config.url.reveal.partition("://")[0]
    if scheme not in _SOURCES:
        raise ConfigError(f"no source serves {scheme}://; there are {', '.join(_SOURCES)}")
    module_name, class_name = _SOURCES[scheme]
    with imports_of_extra("relay", needed_by=f"the {scheme} source"):
        module = importlib.import_module(module_name)
    return cast("Callable[[DatabaseConfig], object]", getattr(module, class_name))
