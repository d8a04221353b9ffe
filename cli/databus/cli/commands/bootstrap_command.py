"""``databus bootstrap``: log writer, server and applier."""

from __future__ import annotations

from typing import Annotated

import typer

from databus.cli.console import serving_log
from databus.cli.console.command_options import ConfigPath, bootstrap_section
from databus.common.errors import BadRequest
from databus.common.extras import require_extra
from databus.common.private import keep_files_private
from databus.common.processes.loading import loading


def bootstrap(
    config: ConfigPath,
    role: Annotated[
        str,
        typer.Option(
            metavar="all|writer|server", help="Run only the log writer or only the server."
        ),
    ] = "all",
    apply: Annotated[bool, typer.Option(help="Run the Spark applier every `apply_every`.")] = True,
) -> None:
    """Run a bootstrap server: log writer, HTTP server and, every `apply_every`, the applier.

    Give `--no-apply` if the applier runs elsewhere, and `--role` to run writer and server as
    separate processes. The command ends with exit code 0 on ctrl-C and SIGTERM.

    Examples:

        databus bootstrap -c databus.toml
        databus bootstrap -c databus.toml --role writer
    """
    if role not in ("all", "writer", "server"):
        raise BadRequest(f"--role {role!r} is not one of all, writer, server")
    require_extra("bootstrap")
    keep_files_private()
    serving_log.log_to_stderr()
    section = bootstrap_section(config)
    with serving_log.compiled_kernels():
        with loading():
            from databus.bootstrap.processes import bootstrap_processes

        def started(url: str) -> None:
            serving_log.announce_bootstrap(url, section)

        if role == "writer":
            serving_log.announce_writer(section)
            bootstrap_processes.run_writer(section)
        elif role == "server":
            bootstrap_processes.run_server(section, started=started)
        else:
            bootstrap_processes.run_bootstrap(section, apply=apply, started=started)
