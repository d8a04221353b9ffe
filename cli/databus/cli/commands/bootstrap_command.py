"""``databus bootstrap``: log writer, server and applier; ``databus apply``: the applier alone;
``databus restore``: a new log for stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from databus.cli.console import serving_log
from databus.cli.console.command_options import (
    ConfigPath,
    LogFormat,
    bootstrap_section,
    load_config,
    seconds,
)
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
    apply: Annotated[bool, typer.Option(help="Run the applier every `apply_every`.")] = True,
    log_format: LogFormat = "text",
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
    serving_log.log_to_stderr(log_format)
    section, whole = bootstrap_section(config), load_config(config)
    with serving_log.compiled_kernels():
        with loading():
            from databus.bootstrap.processes import bootstrap_processes

        def started(url: str) -> None:
            serving_log.announce_bootstrap(url, section)

        if role == "writer":
            serving_log.announce_writer(section)
            bootstrap_processes.run_writer(section)
        elif role == "server":
            bootstrap_processes.run_server(
                whole, started=started, read_again=lambda: load_config(config)
            )
        else:
            bootstrap_processes.run_bootstrap(
                whole, apply=apply, started=started, read_again=lambda: load_config(config)
            )


def apply(
    config: ConfigPath,
    once: Annotated[bool, typer.Option("--once", help="Merge once, then end.")] = False,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="DURATION", help="Merge at this interval until SIGTERM."),
    ] = None,
    log_format: LogFormat = "text",
) -> None:
    """Merge the bootstrap server's log into its snapshot, with Spark or without Java.

    `merge_with` in `[bootstrap]` chooses; by default Spark merges where Java is installed.

    Examples:

        databus apply -c databus.toml --once
        databus apply -c databus.toml --every 30s
    """
    if once == (every is not None):
        raise BadRequest("give either --once or --every DURATION")
    require_extra("bootstrap")
    every_s = None if every is None else seconds("--every", every)
    serving_log.log_to_stderr(log_format)
    section = bootstrap_section(config)
    if every_s is not None:
        serving_log.end_on_sigterm(0)
    with loading():
        from databus.bootstrap.processes.bootstrap_processes import run_applier

    run_applier(section, every_s=every_s)


def restore(
    config: ConfigPath,
    copy: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FOLDER", help="Copy the stores from this copy of a data_dir first."
        ),
    ] = None,
) -> None:
    """Restore the bootstrap server on an empty machine from its runs, on S3 or in a folder.

    The hot log begins again where the runs end, with the schemas, the seeding and the gaps that
    were stored with them. `databus bootstrap` then continues from the relay. A log with content
    is refused. A call that was interrupted can be repeated.

    Examples:

        databus restore -c databus.toml
        databus restore -c databus.toml --from /backup/bootstrap
    """
    require_extra("bootstrap")
    keep_files_private()
    section = bootstrap_section(config)
    if copy is not None and not copy.is_dir():
        raise BadRequest(f"--from {copy} is not a folder")
    with loading():
        from databus.bootstrap.processes.log_restore import restore_logs

    for one in restore_logs(section, copy):
        waiting = f", to be completed: {', '.join(one.waiting[:5])}" if one.waiting else ""
        print(f"{one.database}: restored up to {one.stop}, {one.schemas} schemas{waiting}")
