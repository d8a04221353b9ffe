"""``databus export``: the tables as Parquet, Delta or Iceberg; ``databus mirror``: kept current."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from databus.cli.console import serving_log
from databus.cli.console.command_options import ConfigPath, seconds
from databus.common.errors import (
    BadRequest,
    ConfigError,
    DatabusError,
    ServerUnavailable,
    UnknownSource,
)
from databus.common.extras import require_extra

if TYPE_CHECKING:
    from databus.client.exports.lake_files import Layout
    from databus.client.spark.lake_mirror import MirrorOutcome
    from databus.client.tables.table_reader import TableReader
    from databus.common.checkpoint import Position
    from databus.common.config import Config

FORMATS = ("parquet", "delta", "iceberg")
MIRROR_FORMATS = ("delta", "iceberg")


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


def mirror(
    config: ConfigPath,
    form: Annotated[str, typer.Option("--format", metavar="|".join(MIRROR_FORMATS))] = "delta",
    source: Annotated[str, typer.Option(metavar="GLOB", help="Sources to mirror.")] = "*",
    to: Annotated[
        str, typer.Option(metavar="DIR|s3://BUCKET/PREFIX", help="Where the tables are.")
    ] = "lake",
    once: Annotated[bool, typer.Option("--once", help="Bring the tables up once, end.")] = False,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="DURATION", help="Do so at this interval until SIGTERM."),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Spark's master; by default Spark's configuration."),
    ] = None,
    spark: Annotated[
        list[str] | None,
        typer.Option("--spark", metavar="NAME=VALUE", help="A setting of Spark; repeatable."),
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Your step between changes and tables."),
    ] = None,
    partition_by: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE=COLUMN,...", help="Partition a new table; repeatable."),
    ] = None,
    cluster_by: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE=COLUMN,...", help="Order of rows in files; repeatable."),
    ] = None,
    file_rows: Annotated[int, typer.Option(min=1, help="Most rows of a data file.")] = 1_000_000,
    tasks: Annotated[int, typer.Option(min=1, help="Spark tasks that read one table.")] = 4,
    parallel: Annotated[int, typer.Option(min=1, help="Tables worked on at the same time.")] = 4,
    bootstrap: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The bootstrap server; by default the one of the file."),
    ] = None,
) -> None:
    """Keep tables in the lake equal to their sources, with Spark: Delta or Iceberg.

    At each interval all tables of a database are brought to one transaction of the source: rows of
    changed keys are merged into the files that hold them. A table's own commit stores the position,
    so a mirror that is killed resumes there. The tables lie where `databus export` has them, and
    each of the two continues the other's.

    Examples:

        databus mirror -c databus.toml --to lake --every 10s
        databus mirror -c databus.toml --format iceberg --to s3://bucket/lake --once
        databus mirror -c databus.toml --source 'shop.*' --once --master spark://host:7077
        databus mirror -c databus.toml --once --partition-by shop.orders=state
        databus mirror -c databus.toml --once --transform my_module:my_function
    """
    if form not in MIRROR_FORMATS:
        raise BadRequest(f"--format {form!r} is not one of {', '.join(MIRROR_FORMATS)}")
    if once == (every is not None):
        raise BadRequest("give either --once or --every DURATION")
    every_s = None if every is None else seconds("--every", every)
    layouts = _layouts_of(
        _assigned("--partition-by", partition_by), _assigned("--cluster-by", cluster_by)
    )
    settings = dict(_assigned("--spark", spark))
    loaded = _loaded(config)
    url = bootstrap or _address(config, loaded)
    function = None if transform is None else _named_function(transform)
    require_extra("mirror")
    from databus.client.exports.export_formats import Lake
    from databus.client.spark.lake_mirror import MirrorOptions
    from databus.client.spark.mirror_passes import MirroredDatabase, start_session
    from databus.client.spark.table_merge import MergeSizes

    lake = Lake(form, to, loaded)
    options = MirrorOptions(MergeSizes(file_rows, tasks), function)
    databases: dict[str, MirroredDatabase] = {}
    if every_s is not None:
        serving_log.end_on_sigterm(0)
    session = start_session(master, settings)

    def run_pass() -> int:
        failed = found = 0
        for one in _json(url, "/v1/databases")["databases"]:
            name = str(one["name"])
            sources = _sources(url, name, source)
            if name not in databases:
                databases[name] = MirroredDatabase(
                    session, lake, name, url, options, layouts, parallel
                )
            failed += databases[name].run(sources, functools.partial(_report, name))
            found += len(sources)
        if not found:
            raise UnknownSource(f"{url} has no source that matches {source!r}", source=source)
        return failed

    try:
        while True:
            begun_s = time.monotonic()
            failed = run_pass()
            if every_s is None:
                break
            time.sleep(max(0.0, begun_s + every_s - time.monotonic()))
    finally:
        session.stop()
    if failed:
        raise typer.Exit(1)


def add_to(cli: typer.Typer) -> None:
    """Add the commands to the command line."""
    cli.command()(export)
    cli.command()(mirror)


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
    """The names of the sources that match."""
    from databus.common.filters.stream_filter import matches, parse_sources

    listed = _json(url, f"/v1/{database}/sources")["sources"]
    return [one["name"] for one in listed if matches(one["name"], parse_sources(pattern))]


def _loaded(config: Path) -> Config:
    """The configuration in a file."""
    from databus.common import config as configuration

    return configuration.load(config)


def _address(path: Path, config: Config) -> str:
    """The URL of the file's own bootstrap server.

    Raises:
        ConfigError: the file has none.
    """
    section = config.bootstrap
    if section is None:
        raise ConfigError(f"{path}: there is no [bootstrap] section")
    host, _, port = section.listen.rpartition(":")
    return f"{config.http.scheme}://{'127.0.0.1' if host in ('', '0.0.0.0') else host}:{port}"


def _json(url: str, path: str) -> Any:
    """A JSON document of a bootstrap server."""
    from databus.common.http.peer_calls import peer_call

    try:
        with peer_call("GET", url.rstrip("/"), path, silence_s=20) as answer:
            return answer.json_object()
    except ServerUnavailable as error:
        raise ServerUnavailable(
            f"{error.message} (exports and mirrors read from the bootstrap server)"
        ) from error


def _report(database: str, source: str, what: MirrorOutcome | Exception) -> None:
    if isinstance(what, DatabusError):
        print(f"{database}/{source}: {what.code}: {what.message}. {what.hint}", file=sys.stderr)
    elif isinstance(what, Exception):
        print(f"{database}/{source}: {what}", file=sys.stderr)
    elif what.kind != "nothing":
        print(
            f"{database}/{source}: {what.kind}, {what.rows} rows in {what.files_added} files, "
            f"{what.files_removed} files replaced, at {what.position}",
            flush=True,
        )


def _named_function(name: str) -> Callable[..., Any]:
    """The function that ``--transform`` names.

    Raises:
        BadRequest: there is none of this name.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, "")  # as `python` has it: the user's modules lie in the current folder
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadRequest(f"--transform {name!r}: {error}") from error
    if not callable(found):
        raise BadRequest(f"--transform {name!r} is no function")
    return found


def _layouts_of(
    partitions: Iterable[tuple[str, str]], clusters: Iterable[tuple[str, str]]
) -> dict[str, Layout]:
    """The layout of each table that the options name."""
    from databus.client.exports.lake_files import Layout

    by_partition, by_cluster = dict(partitions), dict(clusters)
    return {
        source: Layout(_columns(by_partition.get(source)), _columns(by_cluster.get(source)))
        for source in by_partition.keys() | by_cluster.keys()
    }


def _columns(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _assigned(option: str, given: Iterable[str] | None) -> list[tuple[str, str]]:
    """``NAME=VALUE`` options as pairs."""
    found = []
    for one in given or ():
        name, sign, value = one.partition("=")
        if not name or not sign or not value:
            raise BadRequest(f"{option} {one!r} is not of the form NAME=VALUE")
        found.append((name, value))
    return found
