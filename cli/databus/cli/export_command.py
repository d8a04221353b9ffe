"""``databus export``: the tables as Parquet, Delta or Iceberg."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from databus.common.errors import (
    BadRequest,
    ConfigError,
    MissingDependency,
    ServerUnavailable,
    UnknownSource,
)

if TYPE_CHECKING:
    from databus.client.exports.export import OpenTable

FORMATS = ("parquet", "delta", "iceberg")


def export(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="The TOML file; see the README.")
    ],
    form: Annotated[str, typer.Option("--format", metavar="|".join(FORMATS))] = "parquet",
    source: Annotated[str, typer.Option(metavar="GLOB", help="Which sources.")] = "*",
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the tables are kept.")] = Path(
        "export"
    ),
    since: Annotated[
        str,
        typer.Option(metavar="auto|0", help="What changed since the last export, or everything."),
    ] = "auto",
    bootstrap: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The bootstrap server; by default that of the file."),
    ] = None,
) -> None:
    """Keep the tables as Parquet, Delta or Iceberg, for readers that have nothing of ours.

    The first export writes everything, each further one what has changed since; all tables stand
    at one transaction of the source.  The tables are DIR/DATABASE/SOURCE, with Parquet their
    folder `current`, with Iceberg those of the SQL catalog DIR/DATABASE/catalog.db.

    Examples:

        databus export -c databus.toml
        databus export -c databus.toml --format delta --source 'shop.*' --to lake
    """
    if form not in FORMATS:
        raise BadRequest(f"--format {form!r} is none of {', '.join(FORMATS)}")
    if since not in ("auto", "0"):
        raise BadRequest(f"--since {since!r} is neither auto nor 0")
    url = bootstrap or _address(config)
    try:
        from databus.client.exports.export import export as export_table
        from databus.client.tables import TableAddress, TableReader

        make = _opener(form)
    except ImportError as error:
        raise MissingDependency(
            f"{error.name} is not installed; it comes with: pip install 'databus-cdc[export]'"
        ) from error
    found = 0
    for database in _json(url, "/v1/databases")["databases"]:
        name = database["name"]
        until = None
        for one in _sources(url, name, source):
            reader = TableReader(TableAddress(name, one, (), (url,)))
            reader.schema()
            until = until or reader.target()
            outcome = export_table(
                reader, make(to / name, one, reader.clock), until, anew=since == "0"
            )
            found += 1
            print(
                f"{name}/{one}: {outcome.kind}, {outcome.upserted} rows written, "
                f"{outcome.deleted} deleted, at {outcome.position}"
            )
    if not found:
        raise UnknownSource(f"{url} has no source that matches {source!r}", source=source)


def add_to(cli: typer.Typer) -> None:
    """Add the command to the command line."""
    cli.command()(export)


def _opener(form: str) -> Callable[[Path, str, str], Callable[[Sequence[str]], OpenTable]]:
    """What makes a table of the format, of folder, source, clock and key."""
    if form == "parquet":
        from databus.client.exports.parquet import ParquetTable

        return lambda folder, source, clock: lambda key: ParquetTable(folder / source, key)
    if form == "delta":
        from databus.client.exports.delta import DeltaLakeTable

        return lambda folder, source, clock: lambda key: DeltaLakeTable(folder / source, key, clock)
    from databus.client.exports.iceberg import IcebergTable, open_catalog

    return lambda folder, source, clock: (
        lambda key: IcebergTable(open_catalog(folder), tuple(source.split(".")), key)
    )


def _sources(url: str, database: str, pattern: str) -> list[str]:
    from databus.common.filters import matches, parse_sources

    listed = _json(url, f"/v1/{database}/sources")["sources"]
    return [one["name"] for one in listed if matches(one["name"], parse_sources(pattern))]


def _address(config: Path) -> str:
    from databus.common import config as configuration

    section = configuration.load(config).bootstrap
    if section is None:
        raise ConfigError(f"{config}: there is no [bootstrap] section")
    host, _, port = section.listen.rpartition(":")
    return f"http://{'127.0.0.1' if host in ('', '0.0.0.0') else host}:{port}"


def _json(url: str, path: str) -> Any:
    try:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=20) as answer:
            return json.loads(answer.read())
    except OSError as error:
        raise ServerUnavailable(
            f"the bootstrap server at {url} does not answer: {error}; an export reads it"
        ) from error
