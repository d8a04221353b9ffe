"""``databus inspect``: shows the content of files, with the code that reads them in production."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from databus.cli.console.command_group import CommandGroup
from databus.cli.console.command_options import ConfigPath, load_config
from databus.common.errors import BadRequest, ConfigError, FormatError, StoreError
from databus.common.extras import require_extra

cli = typer.Typer(
    cls=CommandGroup,
    help="""Show rings, logs, runs and checkpoints; `--check` verifies every byte of them.

    Example:

        databus inspect ring var/relay/shop --check
    """,
    no_args_is_help=True,
)
Folder = Annotated[Path, typer.Argument(exists=True, help="The folder, or the checkpoint's file.")]
AsJson = Annotated[bool, typer.Option("--json", help="As one JSON object.")]
Check = Annotated[bool, typer.Option("--check", help="Verify; exit code 1 if something is wrong.")]


@cli.command()
def ring(folder: Folder, as_json: AsJson = False, check: Check = False) -> None:
    """A relay's ring.

    Example:

        databus inspect ring var/relay/shop --check
    """
    from databus.relay.ring.ring_check import check as check_ring
    from databus.relay.ring.ring_check import describe_ring

    _show(f"ring {folder}", describe_ring(folder), as_json)
    if check:
        _report(f"ring {folder}", check_ring(folder))


@cli.command()
def log(folder: Folder, as_json: AsJson = False) -> None:
    """A bootstrap's hot log; the command verifies every frame of it.

    Example:

        databus inspect log var/bootstrap/shop
    """
    from databus.bootstrap.log.log_check import describe_log

    _show(f"log {folder}", describe_log(folder), as_json)


@cli.command()
def runs(folder: Folder, as_json: AsJson = False, check: Check = False) -> None:
    """A bootstrap's runs.

    Example:

        databus inspect runs var/bootstrap/shop --check
    """
    from databus.bootstrap.log import log_handover
    from databus.bootstrap.log.hot_log import FOLDER
    from databus.bootstrap.runs.manifest import Store
    from databus.bootstrap.runs.store_summary import describe

    store = Store(folder)
    if lost := log_handover.problems(folder / FOLDER, store):
        raise StoreError(lost[0])
    if not store.manifest_path.exists():
        raise StoreError(f"{folder} holds no runs: there is no {store.manifest_path.name}")
    _show(f"runs {folder}", describe(store), as_json)
    if check:
        _report(f"runs {folder}", [*store.read().problems(), *store.check()])


@cli.command()
def checkpoint(file: Folder, as_json: AsJson = False) -> None:
    """A consumer's checkpoints, the newest first.

    Example:

        databus inspect checkpoint shop.checkpoint
    """
    from databus.client.checkpoints.checkpoint_stores import describe_checkpoint

    found = describe_checkpoint(file)
    if not found["checkpoints"]:
        raise StoreError(f"{file} holds no checkpoint; {found['damaged']} lines are damaged")
    _show(f"checkpoint {file}", found, as_json)


@cli.command()
def binlog(
    database: Annotated[str, typer.Argument(help="The name of a MariaDB or MySQL database.")],
    config: ConfigPath,
    after: Annotated[int | None, typer.Option(help="Begin after the window of this SCN.")] = None,
    upto: Annotated[int | None, typer.Option(help="End with the window of this SCN.")] = None,
    as_json: AsJson = False,
) -> None:
    """A relay's ring beside the binlog, as another library reads it.

    `mysql-replication` shares no code with the relay. The command reads the server's binlog
    with it, from the transaction after `--after` (the ring's first) to `--upto` (its last), and
    compares the rows of each transaction with the ring. Exit code 1 if something differs.

    Example:

        databus inspect binlog shop -c databus.toml
    """
    require_extra("inspect")
    from databus.relay.ring.data_folder import DatabaseFolder
    from databus.relay.sources.mysql.comparison import binlog_comparison

    found = load_config(config)
    chosen = {one.name: one for one in found.database}.get(database)
    if found.relay is None or chosen is None:
        raise ConfigError(f"{config}: there is no [relay] with a [[database]] {database!r}")
    if not chosen.url.reveal.startswith(("mariadb://", "mysql://")):
        raise BadRequest(f"database {database} has no binlog: its URL is {chosen.url}")
    folder = DatabaseFolder.of(found.relay.data_dir, database)
    compared = binlog_comparison.compare(chosen, folder.path, after, upto)
    _show(f"binlog of {database}", compared.document(), as_json)
    if compared.difference_count:
        _report(f"binlog of {database}", compared.differences)


def _show(title: str, document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(document))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left", box=None)
    for name, value in document.items():
        table.add_row(name.replace("_", " "), _cell(value))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, dict) and set(value) <= {"scn", "seq"} and value:
        return f"{value['scn']}:{value.get('seq', 'end')}"
    if isinstance(value, list | tuple):
        return "\n".join(map(_cell, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_cell(item)}" for name, item in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _report(title: str, problems: list[str]) -> None:
    if problems:
        raise FormatError(f"{title}: {len(problems)} problems: " + "; ".join(problems[:20]))
    print(f"{title}: everything in order")
