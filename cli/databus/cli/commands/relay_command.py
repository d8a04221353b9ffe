"""``databus relay``, and ``databus reload`` for a running relay."""

from __future__ import annotations

from databus.cli.console import serving_log
from databus.cli.console.command_options import ConfigPath, LogFormat, load_config
from databus.common.errors import ConfigError
from databus.common.extras import require_extra
from databus.common.private import keep_files_private
from databus.common.processes.loading import loading


def relay(config: ConfigPath, log_format: LogFormat = "text") -> None:
    """Run a relay: one fetcher process for each database, and the HTTP workers.

    The command ends with exit code 0 on ctrl-C and SIGTERM.

    Example:

        databus relay -c databus.toml
    """
    require_extra("relay")
    keep_files_private()
    serving_log.log_to_stderr(log_format)
    loaded = load_config(config)
    if loaded.relay is None or not loaded.database:
        raise ConfigError(f"{config}: a relay needs [relay] and at least one [[database]]")
    with serving_log.compiled_kernels():
        with loading():
            from databus.relay.processes.supervisor import run_relay

        run_relay(
            loaded,
            lambda supervisor: serving_log.announce_relay(supervisor.url, loaded.database),
            lambda: load_config(config),
        )


def reload(config: ConfigPath) -> None:
    """Make a running relay read its configuration file again.

    Databases can be added, changed and removed. Other databases continue, and their readers stay
    connected. The relay refuses a file that has an error or that needs a restart, and
    continues with the old one. SIGHUP to `databus relay` does the same.

    Example:

        databus reload -c databus.toml
    """
    import asyncio

    require_extra("relay")
    loaded = load_config(config)
    if loaded.relay is None:
        raise ConfigError(f"{config}: there is no [relay] section")
    from databus.relay.processes.reload import ask_reload

    done = asyncio.run(ask_reload(loaded.relay.data_dir))
    for what, names in done.items():
        for name in names:
            print(f"{what} {name}")
    if not any(done.values()):
        print("nothing has changed")
