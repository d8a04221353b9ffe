"""``databus check`` before anything runs; ``doctor``, ``status`` and ``resync`` while it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from databus.cli.console.command_options import load_config
from databus.common.errors import BadRequest
from databus.common.extras import require_extra


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML file.")],
) -> None:
    """Examine the configuration and its databases; change nothing.

    The command prints each finding with the statement that corrects it, and the tables that the
    relay with this data_dir does not follow. The exit code is 3 if a finding forbids capture.

    Example:

        databus check databus.toml
    """
    import asyncio

    require_extra("relay")
    from databus.cli.console import preflight_report

    asyncio.run(preflight_report.check(load_config(config)))


def doctor(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="Relays and bootstrap servers.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="Examine what this file configures, too."
        ),
    ] = None,
) -> None:
    """Find what is wrong, or will be, and print the cure of each finding; change nothing.

    Of each server: whether it answers, its clock and version, its fetchers, suspended tables, and
    the lag of its readers against what the ring retains. With a configuration also its databases
    (as `databus check` does), disks, folder modes, open files, and Java. The exit code is 3 if a
    finding stops changes or loses them.

    Examples:

        databus doctor http://relay-a:8700 http://bootstrap:8701
        databus doctor -c databus.toml
    """
    if not urls and config is None:
        raise BadRequest("give the URLs of servers, or a configuration with -c")
    require_extra("relay" if config is not None else "client")
    from databus.cli.doctor.examination import examine

    examine(None if config is None else load_config(config), urls or [])


def status(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Relays and bootstraps.")],
    json_: Annotated[
        bool, typer.Option("--json", help="As JSON, one object for each server.")
    ] = False,
) -> None:
    """Show what relays and bootstrap servers hold, and how far behind they are.

    Example:

        databus status http://127.0.0.1:8700 http://127.0.0.1:8701
    """
    from databus.cli.console import server_status

    server_status.status(urls, as_json=json_)


def resync(
    url: Annotated[str, typer.Argument(metavar="RELAY_URL/DATABASE")],
    table: Annotated[str, typer.Argument(metavar="SCHEMA.TABLE")],
) -> None:
    """Resynchronise a suspended table now; with resync = "manual" this confirms it.

    Example:

        databus resync http://127.0.0.1:8700/shop shop.orders
    """
    from databus.cli.console import server_status

    server_status.resync(url, table)
