"""``databus status``: what relays and bootstrap servers hold."""

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
