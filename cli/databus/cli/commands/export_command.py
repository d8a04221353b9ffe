"""``databus export``: the tables as Parquet, Delta or Iceberg."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from databus.common.errors import (
    BadRequest,
    ConfigError,
    ServerUnavailable,
    UnknownSource,
)
from databus.common.extras import require_extra
from databus.common.http.peer_calls import peer_call

if TYPE_CHECKING:
    from databus.client.tables.table_reader import TableReader
    from databus.common.checkpoint import Position
    from databus.common.config import Config

FORMATS = ("parquet", "delta", "iceberg")


def export(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="The configuration file, TOML.")
    ],
    form: Annotated[str, typer.Option("--format", metavar="|".join(FORMATS))] = "parquet",
    source: Annotated[str, typer.Option(metavar="GLOB", help="Sources to export.")] = "*",
    to: Annotated[
        str, typer.Option(metavar="DIR|s3://BUCKET/PREFIX", help="Where to write the tables.")
    ] = "export",
    since: Annotated[
        str,
        typer.Option(
            metavar="auto|0|SCN|TIME",
            help="Export what has changed since the last export, everything, or since a position.",
        ),
    ] = "auto",
    bootstrap: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The bootstrap server; by default the one of the file."),
    ] = None,
) -> None:
    """Write tables as Parquet, Delta or Iceberg, for readers without Databus.

    The first export writes everything, each further one what has changed since. All tables end at
    one transaction of the source. The tables are DIR/DATABASE/SOURCE: with Parquet their folder
    `current`, with Iceberg tables of the SQL catalog DIR/DATABASE/catalog.db. On S3 the object
    `current/files.txt` has the URLs of a Parquet table's files. [export.s3], else [bootstrap.s3],
    configures S3, and [export.catalog] an Iceberg catalog of your own.

    With --since SCN, SCN:SEQ or a commit time, the changes after it are applied once more; a table
    must have reached that position.

    Examples:

        databus export -c databus.toml
        databus export -c databus.toml --format delta --source 'shop.*' --to lake

        databus export -c databus.toml --format iceberg --to s3://bucket/lake
    """
    if form not in FORMATS:
        raise BadRequest(f"--format {form!r} is not one of {', '.join(FORMATS)}")
    loaded = _loaded(config)
    url = bootstrap or _address(config, loaded)
    require_extra("export")
    from databus.client.exports.export_formats import Lake
    from databus.client.exports.table_export import export as export_table
    from databus.client.tables.table_reader import TableAddress, TableReader

    lake = Lake(form, str(to), loaded)
    found = 0
    for database in _json(url, "/v1/databases")["databases"]:
        name = database["name"]
        until = None
        for one in _sources(url, name, source):
            reader = TableReader(TableAddress(name, one, (), (url,)))
            reader.schema()
            until = until or reader.target()
            begin = None if since in ("auto", "0") else _position(reader, since)
            table = lake.table(name, one, reader.clock)
            with lake.writing(name, one):
                outcome = export_table(reader, table, until, rewrite=since == "0", since=begin)
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


def _position(reader: TableReader, since: str) -> Position:
    """The position of ``--since`` at the server.

    Raises:
        BadRequest: it is neither a position nor a time.
    """
    try:
        return reader.position_of(since)
    except BadRequest as error:
        raise BadRequest(
            f"--since {since!r} is neither auto, 0, SCN, SCN:SEQ nor a time: {error.message}"
        ) from error


def _sources(url: str, database: str, pattern: str) -> list[str]:
    from databus.common.filters.stream_filter import matches, parse_sources

    listed = _json(url, f"/v1/{database}/sources")["sources"]
    return [one["name"] for one in listed if matches(one["name"], parse_sources(pattern))]


def _loaded(config: Path) -> Config:
    from databus.common import config as configuration

    return configuration.load(config)


def _address(path: Path, config: Config) -> str:
    section = config.bootstrap
    if section is None:
        raise ConfigError(f"{path}: there is no [bootstrap] section")
    host, _, port = section.listen.rpartition(":")
    return f"{config.http.scheme}://{'127.0.0.1' if host in ('', '0.0.0.0') else host}:{port}"


def _json(url: str, path: str) -> Any:
    try:
        with peer_call("GET", url.rstrip("/"), path, silence_s=20) as answer:
            return answer.json_object()
    except ServerUnavailable as error:
        raise ServerUnavailable(
            f"{error.message} (an export reads from the bootstrap server)"
        ) from error
