"""``databus sink``: the changes of a database, written to another system."""

from __future__ import annotations

from typing import Annotated

import typer

from databus.cli.console import serving_log
from databus.cli.console.command_options import ConfigPath, LogFormat, load_config
from databus.common.errors import ConfigError
from databus.common.extras import require_extra
from databus.common.private import keep_files_private


def sink(
    config: ConfigPath,
    log_format: LogFormat = "text",
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Write the rows that were set aside again, and end; stop the sink first.",
        ),
    ] = False,
) -> None:
    """Run the sink of the section [sink]: write the changes of a database to another system.

    The command ends with exit code 0 on ctrl-C and SIGTERM, after a last commit. A failure of the
    target is retried. The exit code of `--replay` is 1 if rows are left.

    Examples:

        databus sink -c sink.toml
        databus sink -c sink.toml --replay
    """
    require_extra("sink")
    keep_files_private()
    serving_log.log_to_stderr(log_format)
    section = load_config(config).sink
    if section is None:
        raise ConfigError(f"{config}: there is no [sink] section")
    from databus.client.sinks.sink_kinds import sink_of
    from databus.client.sinks.sink_process import SinkProcess

    process = SinkProcess(section, sink_of(section))
    if replay:
        import asyncio

        from databus.cli.commands.deadletters_command import print_replayed

        print_replayed(asyncio.run(process.replay()))
        return
    serving_log.announce_sink(section)
    process.run()
