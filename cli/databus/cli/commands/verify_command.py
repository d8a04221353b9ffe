"""``databus verify``: compares the bootstrap server's copy with the source, and repairs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from databus.common.errors import ConfigError, UnknownSource
from databus.common.extras import require_extra

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.table import Table

    from databus.bootstrap.verify.table_copy import ServedCopy
    from databus.bootstrap.verify.table_verifier import Report
    from databus.common.config import Config

EXIT_DIFFERENT = 4
SHOWN_KEYS = 5


def verify(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="The configuration file, TOML.")
    ],
    source: Annotated[
        str, typer.Option("--source", metavar="GLOB", help="Only tables that match.")
    ] = "*",
    database: Annotated[
        str, typer.Option("--database", metavar="NAME", help="Only this database.")
    ] = "",
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Dump the rows that differ, and delete those that the source has deleted.",
        ),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object for each table.")] = False,
) -> None:
    """Compare the source with the bootstrap server's copy while both are in use.

    Relay and bootstrap server must run. The source is read in chunks, as for a dump, and is not
    locked. The command names the key ranges that differ. The exit code is 0 if the tables are equal
    or repaired, and 4 if they differ.

    Examples:

        databus verify -c databus.toml
        databus verify -c databus.toml --source 'shop.orders' --repair
    """
    import asyncio

    require_extra("bootstrap")
    from databus.common import config as configuration

    reports = asyncio.run(
        _verify(configuration.load(config), str(config), database, source, repair, json_)
    )
    if not all(report.is_equal for report in reports):
        raise typer.Exit(EXIT_DIFFERENT)


def add_to(cli: typer.Typer) -> None:
    """Add the command to the command line."""
    cli.command()(verify)


async def _verify(
    config: Config, path: str, database: str, pattern: str, repair: bool, as_json: bool
) -> list[Report]:
    from databus.bootstrap.verify.table_copy import HttpPeer, ServedCopy
    from databus.bootstrap.verify.table_verifier import Verifier

    if config.bootstrap is None:
        raise ConfigError(f"{path}: there is no [bootstrap] section")
    scheme = config.http.scheme
    relay = f"{scheme}://{config.relay.listen}" if config.relay else config.bootstrap.relays[0]
    names = [database] if database else [one.name for one in config.database]
    names = names or list(config.bootstrap.databases)
    if not names:
        raise ConfigError(f"{path} names no database; give one with --database")
    from rich.console import Console

    console = Console(soft_wrap=True)
    reports: list[Report] = []
    for name in names:
        with console.status(f"{name}: comparing") as status:

            def show(table: str, rows: int, status: Status = status) -> None:
                status.update(f"{table}: {rows:,} rows of the source")

            async with (
                HttpPeer(relay, name) as source,
                HttpPeer(f"{scheme}://{config.bootstrap.listen}", name) as server,
            ):
                copy = ServedCopy(server)
                verifier = Verifier(source, copy, progress=show)
                found = await _tables(copy, name, pattern)
                here = [await verifier.verify(table, repair=repair) for table in found]
        reports += here
        if as_json:
            for report in here:
                print(json.dumps({"database": name, **report.to_json()}))
        else:
            console.print(_table(name, here))
            for report in here:
                _print_differences(console, report)
                if report.retained:
                    console.print(
                        f"{report.source}: the copy retains {report.retained:,} rows that the "
                        "source has deleted, because skipped_operations leaves deletes out",
                        markup=False,
                    )
    return reports


async def _tables(copy: ServedCopy, database: str, pattern: str) -> list[str]:
    from databus.common.filters.stream_filter import matches

    known = await copy.sources()
    found = [table for table in known if matches(table, (pattern,))]
    if not found:
        raise UnknownSource(
            f"{database} has no source {pattern!r} in its copy; there are {', '.join(known)}"
        )
    return found


def _table(name: str, reports: list[Report]) -> Table:
    from rich.table import Table

    table = Table(title=f"{name}: the copy against the source", title_justify="left")
    for column in ("source", "rows", "at", "differ", "in flux", "result", "seconds"):
        table.add_column(column, no_wrap=True)
    for report in reports:
        result = "repaired" if report.repaired else "equal" if report.is_equal else "DIFFERENT"
        table.add_row(
            report.source,
            f"{report.rows:,}",
            str(report.at),
            f"{len(report.differences):,}",
            f"{report.in_flux:,}",
            result,
            f"{report.seconds:.1f}",
        )
    return table


def _print_differences(console: Console, report: Report) -> None:
    for keys, count in report.ranges():
        if keys is None:
            where = "not at the source any more"
        else:
            where = f"keys {keys.after or 'from the first'} to {keys.upto or 'the last'}"
        console.print(f"{report.source}: {count:,} differ, {where}", markup=False)
        here = [one for one in report.differences if one.keys is keys]
        for one in here[:SHOWN_KEYS]:
            columns = f" in {', '.join(one.columns)}" if one.columns else ""
            console.print(f"  {one.result} {one.shown_key}{columns}", markup=False)
        if len(here) > SHOWN_KEYS:
            console.print(f"  and {len(here) - SHOWN_KEYS:,} more", markup=False)
