"""``databus tail``: the changes of a database."""

from __future__ import annotations

from typing import Annotated

import typer

from databus.cli.console.command_options import seconds
from databus.common.errors import BadRequest
from databus.common.extras import require_extra


def tail(
    url: Annotated[str, typer.Argument(metavar="RELAY_URL/DATABASE")],
    bootstrap: Annotated[
        list[str] | None, typer.Option("--bootstrap", metavar="URL", help="A bootstrap server.")
    ] = None,
    sources: Annotated[str, typer.Option(help="Globs over source names, comma separated.")] = "*",
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="oldest|latest|bootstrap|SCN|TIME",
            help="Where to start; TIME is a commit time in ISO 8601, in UTC if it has no zone.",
        ),
    ] = "oldest",
    until_idle: Annotated[
        str | None,
        typer.Option(
            "--until-idle", metavar="DURATION", help="End after this time without an event."
        ),
    ] = None,
    output: Annotated[str, typer.Option("--format", metavar="json|table")] = "json",
    partition: Annotated[
        str | None,
        typer.Option(metavar="mod:N:A,B|hash:N:A,B|range:SIZE:A-B", help="Only these keys."),
    ] = None,
    ops: Annotated[str | None, typer.Option(metavar="c,u,d,r", help="Only these changes.")] = None,
) -> None:
    """Print the changes of a database as they are committed.

    With `--bootstrap`, the command reads a bootstrap server if the relay no longer has the
    position. Ctrl-C ends it with exit code 130.

    Examples:

        databus tail http://127.0.0.1:8700/shop --from latest
        databus tail http://127.0.0.1:8700/shop --from 2026-03-01T12:00:00Z
        databus tail http://127.0.0.1:8700/shop --sources shop.orders --ops c,d --format table
        databus tail http://127.0.0.1:8700/shop --until-idle 2s \\
            --bootstrap http://127.0.0.1:8701 --from bootstrap
    """
    if output not in ("json", "table"):
        raise BadRequest(f"--format {output!r} is neither json nor table")
    require_extra("client")
    from databus.cli.console import tail_output

    tail_output.run(
        url,
        bootstraps=bootstrap or [],
        sources=sources,
        start=start,
        until_idle_s=None if until_idle is None else seconds("--until-idle", until_idle),
        as_table=output == "table",
        partition=partition,
        ops=ops,
    )
