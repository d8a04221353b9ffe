"""``databus status`` and ``databus resync``: what servers hold, and the cure of a table."""

from __future__ import annotations

from typing import Annotated

import typer


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
