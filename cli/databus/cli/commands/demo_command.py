"""``databus demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from databus.common.errors import BadRequest
from databus.common.extras import require_extra

EXIT_DIFFERENT = 4
SHORTEST_S = 25.0


def demo(
    db: Annotated[
        str, typer.Option(metavar="sqlite|postgres|mariadb", help="The database.")
    ] = "sqlite",
    duration: Annotated[float, typer.Option(help="Seconds, from start to result.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 1,
    keep: Annotated[bool, typer.Option(help="Keep the folder with logs and data.")] = False,
    cluster: Annotated[
        bool, typer.Option(help="Two relays; the one that leads is killed, the next is stopped.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the picture as SVG.")
    ] = None,
) -> None:
    """Show the whole system at work on a small shop, and compare the results.

    A workload changes a database. Relay, log writer, applier, bootstrap server and two consumers
    run beside it. Without Java, the applier merges without Spark. One consumer sleeps until the
    relay no longer has its position. At the end the command compares each consumer's tables with
    the source, row by row. The exit code is 0 if all are equal, and 4 if not.

    With --cluster, two relays share the database, PostgreSQL unless --db is mariadb. The relay
    that leads is killed, and the other one takes over. The killed one comes back and follows.
    Then the relay that leads is stopped. The duration counts after both consumers read the relays.

    Examples:

        databus demo
        databus demo --db postgres --duration 40
        databus demo --cluster
    """
    import asyncio

    require_extra("demo")
    from databus.cli.demo.demo import Demo
    from databus.cli.demo.shop import DIALECTS

    if db not in DIALECTS:
        raise BadRequest(f"--db {db!r} is not one of {', '.join(DIALECTS)}")
    if duration < SHORTEST_S:
        raise BadRequest(f"--duration {duration} is too short; give {SHORTEST_S:.0f} or more")
    if cluster:
        from databus.cli.demo.cluster_demo import ClusterDemo

        if picture is not None:
            raise BadRequest("--picture is for the demo without --cluster")
        kind = "postgres" if db == "sqlite" else db
        run = ClusterDemo(kind, duration_s=duration, seed=seed, keep=keep).run()
        if not asyncio.run(run):
            raise typer.Exit(EXIT_DIFFERENT)
        return
    equal = asyncio.run(Demo(db, duration_s=duration, seed=seed, keep=keep, picture=picture).run())
    if not equal:
        raise typer.Exit(EXIT_DIFFERENT)


def add_to(cli: typer.Typer) -> None:
    """Add the command to the command line."""
    cli.command()(demo)
