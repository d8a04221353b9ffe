"""``databus apply``: the applier alone."""

from __future__ import annotations

from typing import Annotated

import typer

from databus.cli.console import serving_log
from databus.cli.console.command_options import ConfigPath, bootstrap_section, seconds
from databus.common.errors import BadRequest
from databus.common.extras import require_extra
from databus.common.processes.loading import loading


def apply(
    config: ConfigPath,
    once: Annotated[bool, typer.Option("--once", help="Merge once, then end.")] = False,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="DURATION", help="Merge at this interval until SIGTERM."),
    ] = None,
) -> None:
    """Merge the bootstrap server's log into its snapshot with Spark.

    Examples:

        databus apply -c databus.toml --once
        databus apply -c databus.toml --every 30s
    """
    if once == (every is not None):
        raise BadRequest("give either --once or --every DURATION")
    require_extra("bootstrap")
    every_s = None if every is None else seconds("--every", every)
    serving_log.log_to_stderr()
    section = bootstrap_section(config)
    if every_s is not None:
        serving_log.end_on_sigterm(0)
    with loading():
        from databus.bootstrap.processes.bootstrap_processes import run_applier

    run_applier(section, every_s=every_s)
