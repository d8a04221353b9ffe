"""``databus resync``: resynchronises a suspended table."""

from __future__ import annotations

from typing import Annotated

import typer


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
