"""The commands that run a process or ask one: relay, bootstrap, apply, check, tail and so on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from databus.cli import serving
from databus.common.errors import BadRequest, ConfigError
from databus.common.extras import require_extra
from databus.common.loading import loading
from databus.common.private import keep_files_private

if TYPE_CHECKING:
    from databus.common.config import BootstrapConfig, Config

ConfigPath = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="The configuration file, TOML.")
]


def relay(config: ConfigPath) -> None:
    """Run a relay: one fetcher process for each database, and the HTTP workers.

    The command ends with exit code 0 on ctrl-C and SIGTERM.

    Example:

        databus relay -c databus.toml
    """
    require_extra("relay")
    keep_files_private()
    serving.log_to_stderr()
    loaded = _load(config)
    if loaded.relay is None or not loaded.database:
        raise ConfigError(f"{config}: a relay needs [relay] and at least one [[database]]")
    with serving.compiled_kernels():
        with loading():
            from databus.relay.supervisor import run_relay

        run_relay(
            loaded,
            lambda supervisor: serving.announce_relay(supervisor.url, loaded.database),
            lambda: _load(config),
        )


def reload(config: ConfigPath) -> None:
    """Have a running relay read its configuration file again.

    Databases can be added, changed and removed. Other databases are not disturbed, and their
    readers stay connected. The relay refuses a file that has an error or that needs a restart, and
    continues with the old one. SIGHUP to `databus relay` does the same.

    Example:

        databus reload -c databus.toml
    """
    import asyncio

    require_extra("relay")
    loaded = _load(config)
    if loaded.relay is None:
        raise ConfigError(f"{config}: there is no [relay] section")
    from databus.relay.reload import ask_reload

    done = asyncio.run(ask_reload(loaded.relay.data_dir))
    for what, names in done.items():
        for name in names:
            print(f"{what} {name}")
    if not any(done.values()):
        print("nothing has changed")


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
        raise BadRequest(f"--role {role!r} is none of all, writer, server")
    require_extra("bootstrap")
    keep_files_private()
    serving.log_to_stderr()
    section = _bootstrap_section(config)
    with serving.compiled_kernels():
        with loading():
            from databus.bootstrap import process

        def started(url: str) -> None:
            serving.announce_bootstrap(url, section)

        if role == "writer":
            serving.announce_writer(section)
            process.run_writer(section)
        elif role == "server":
            process.run_server(section, started=started)
        else:
            process.run_bootstrap(section, apply=apply, started=started)


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
        raise BadRequest("say either --once or --every DURATION")
    require_extra("bootstrap")
    every_s = None if every is None else _seconds("--every", every)
    serving.log_to_stderr()
    section = _bootstrap_section(config)
    if every_s is not None:
        serving.end_on_sigterm(0)
    with loading():
        from databus.bootstrap.process import run_applier

    run_applier(section, every_s=every_s)


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML file.")],
) -> None:
    """Examine the configuration and its databases; change nothing.

    The command prints each finding with the statement that corrects it, and the tables that the
    relay with this data_dir does not follow. The exit code is 3 if a finding forbids capture.

    Example:

        databus check databus.toml
    """
    import asyncio

    require_extra("relay")
    from databus.cli import asking

    asyncio.run(asking.check(_load(config)))


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
        str | None, typer.Option(metavar="mod:N:A,B|range:SIZE:A-B", help="Only these keys.")
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
    from databus.cli import tailing

    tailing.run(
        url,
        bootstraps=bootstrap or [],
        sources=sources,
        start=start,
        until_idle_s=None if until_idle is None else _seconds("--until-idle", until_idle),
        as_table=output == "table",
        partition=partition,
        ops=ops,
    )


def dump(
    url: Annotated[str, typer.Argument(metavar="RELAY_URL/DATABASE")],
    sources: Annotated[str, typer.Option(help="Globs over source names, comma separated.")] = "*",
    where: Annotated[
        str | None, typer.Option(help="A predicate over the columns; only rows that match.")
    ] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="JSON", help='Only these keys: [7, 9], [[1, "a"]].')
    ] = None,
    chunk_rows: Annotated[
        int | None, typer.Option(help="Rows of each chunk, a fixed number.")
    ] = None,
    chunk_ms: Annotated[
        int | None, typer.Option(help="Time that the read of a chunk should take.")
    ] = None,
    delay_ms: Annotated[int | None, typer.Option(help="Pause between two chunks.")] = None,
    share: Annotated[
        int | None,
        typer.Option(help="Percentage of the time in which to read while the stream has changes."),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(help="Number of chunks that are read at once.")
    ] = None,
    watermark_table: Annotated[
        str | None,
        typer.Option(metavar="TABLE", help="Write watermark rows into this table, as in DBLog."),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Show progress until the dump has ended.")] = True,
    list_: Annotated[bool, typer.Option("--list", help="List the dumps instead.")] = False,
    watch: Annotated[str | None, typer.Option(metavar="ID", help="Show this dump.")] = None,
    pause: Annotated[str | None, typer.Option(metavar="ID", help="Pause this dump.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="ID", help="Resume this dump.")] = None,
    cancel: Annotated[str | None, typer.Option(metavar="ID", help="Cancel this dump.")] = None,
) -> None:
    """Send the rows of tables through the stream, as events of op r, without locks.

    Examples:

        databus dump http://127.0.0.1:8700/shop --sources shop.orders
        databus dump http://127.0.0.1:8700/shop --no-wait --chunk-rows 500 --delay-ms 100
        databus dump http://127.0.0.1:8700/shop --list
        databus dump http://127.0.0.1:8700/shop --pause ID
        databus dump http://127.0.0.1:8700/shop --resume ID --parallel 4
    """
    chosen = [bool(one) for one in (list_, watch, pause, resume, cancel)]
    if sum(chosen) > 1:
        raise BadRequest("say one of --list, --watch, --pause, --resume and --cancel")
    pace = {
        "chunk_rows": chunk_rows,
        "chunk_ms": chunk_ms,
        "delay_ms": delay_ms,
        "share": share,
        "parallel": parallel,
    }
    from databus.cli import asking

    if list_:
        asking.list_dumps(url)
    elif watch:
        asking.watch_dump(url, watch)
    elif pause or resume:
        state = "paused" if pause else "running"
        asking.change_dump(url, pause or resume or "", state, pace)
    elif cancel:
        asking.cancel_dump(url, cancel)
    else:
        options: dict[str, object] = {**pace, "where": where, "watermark_table": watermark_table}
        options["keys"] = None if keys is None else asking.key_list(keys)
        asking.start_dump(url, sources, options, wait=wait)


def resync(
    url: Annotated[str, typer.Argument(metavar="RELAY_URL/DATABASE")],
    table: Annotated[str, typer.Argument(metavar="SCHEMA.TABLE")],
) -> None:
    """Resynchronise a suspended table now; with resync = "manual" this confirms it.

    Example:

        databus resync http://127.0.0.1:8700/shop shop.orders
    """
    from databus.cli import asking

    asking.resync(url, table)


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
    from databus.cli import asking

    asking.status(urls, as_json=json_)


def add_to(cli: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (relay, reload, bootstrap, apply, check, tail, dump, resync, status):
        cli.command()(command)


def _load(path: Path) -> Config:
    from databus.common import config

    return config.load(path)


def _bootstrap_section(path: Path) -> BootstrapConfig:
    section = _load(path).bootstrap
    if section is None:
        raise ConfigError(f"{path}: there is no [bootstrap] section")
    return section


def _seconds(option: str, text: str) -> float:
    from databus.common.config import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise BadRequest(f"{option}: {error}") from None
