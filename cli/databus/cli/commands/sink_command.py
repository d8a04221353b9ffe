"""``databus sink``: the changes of a database, written to another system."""

from __future__ import annotations

from databus.cli.console import serving_log
from databus.cli.console.command_options import ConfigPath, LogFormat, load_config
from databus.common.errors import ConfigError
from databus.common.extras import require_extra
from databus.common.private import keep_files_private


def sink(config: ConfigPath, log_format: LogFormat = "text") -> None:
    """Run the sink of the section [sink]: write the changes of a database to another system.

    The command ends with exit code 0 on ctrl-C and SIGTERM, after a last commit. A failure of the
    target is retried.

    Example:

        databus sink -c sink.toml
    """
    require_extra("sink")
    keep_files_private()
    serving_log.log_to_stderr(log_format)
    section = load_config(config).sink
    if section is None:
        raise ConfigError(f"{config}: there is no [sink] section")
    from databus.client.sinks.sink_kinds import sink_of
    from databus.client.sinks.sink_process import SinkProcess

    serving_log.announce_sink(section)
    SinkProcess(section, sink_of(section)).run()
