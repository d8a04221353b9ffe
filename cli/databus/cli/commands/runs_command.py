"""``databus runs``: which runs a bootstrap store holds, and what the last applies did."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from databus.common.errors import ConfigError, StoreError
from databus.common.extras import require_extra

if TYPE_CHECKING:
    from rich.table import Table

    from databus.bootstrap.runs.manifest import Manifest

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def runs(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="The configuration file, TOML.")
    ],
    json_: Annotated[
        bool, typer.Option("--json", help="As JSON, one object for each database.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Read every frame of every run; fail if one is wrong.")
    ] = False,
) -> None:
    """Show the runs of a bootstrap store, on disk or on S3, and what the last applies did.

    The command reads the store; no server needs to run. `tier` is the number of runs that a merge
    combined.

    Examples:

        databus runs -c databus.toml
        databus runs -c databus.toml --json
        databus runs -c databus.toml --check
    """
    require_extra("bootstrap")
    from rich.console import Console

    from databus.bootstrap.log import log_handover
    from databus.bootstrap.log.configured_stores import Stores
    from databus.bootstrap.log.hot_log import FOLDER
    from databus.bootstrap.runs.apply_progress import applier_document
    from databus.common import config as configuration

    section = configuration.load(config).bootstrap
    if section is None:
        raise ConfigError(f"{config}: there is no [bootstrap] section")
    stores = Stores(section).begun()
    console = Console(soft_wrap=True)
    problems = []
    for name, store in stores.items():
        manifest = store.read()
        applier = applier_document(store.storage)
        if json_:
            document = {"database": name, **_document(manifest), "applier": applier}
            print(json.dumps(document))
        else:
            console.print(_runs_table(name, manifest))
            console.print(_applies_table(name, manifest))
            if unfinished := manifest.unfinished:
                done = f"{unfinished.tasks_done} of {unfinished.tasks} buckets"
                console.print(f"{name}: the next {unfinished.kind.value} has {done}", markup=False)
            if line := _applier_line(applier):
                console.print(f"{name}: {line}", markup=False)
        problems += log_handover.problems(Path(section.data_dir) / name / FOLDER, store)
        problems += [one for one in store.check() if one not in problems] if check else []
    if problems:
        raise StoreError("; ".join(problems))
    if not stores and not json_:
        console.print(f"{section.store or section.data_dir} holds no database yet", markup=False)


def add_to(cli: typer.Typer) -> None:
    """Add the command to the command line."""
    cli.command()(runs)


def _document(manifest: Manifest) -> dict[str, Any]:
    return {
        "manifest": manifest.version,
        "runs": [run.summary() for run in manifest.runs],
        "retired": [retired.run.id for retired in manifest.retired],
        "unfinished": manifest.unfinished.summary() if manifest.unfinished else None,
        "applies": list(manifest.applies),
    }


def _runs_table(name: str, manifest: Manifest) -> Table:
    from rich.table import Table

    retired = f", {len(manifest.retired)} more retired" if manifest.retired else ""
    table = Table(title=f"{name}: {len(manifest.runs)} runs{retired}", title_justify="left")
    for column in ("kind", "from", "to", "rows", "files", "size", "created"):
        table.add_column(column, no_wrap=True)
    for run in manifest.runs:
        table.add_row(
            run.kind.value,
            str(run.start),
            str(run.stop),
            f"{run.rows:,}",
            str(len(run.files)),
            _size(run.file_bytes),
            _time(run.created_us),
        )
    return table


def _applies_table(name: str, manifest: Manifest) -> Table:
    from rich.table import Table

    title = f"{name}: the last {len(manifest.applies)} applies"
    table = Table(title=title, title_justify="left")
    for column in ("finished", "kind", "from", "to", "tier", "rows", "size", "seconds"):
        table.add_column(column, no_wrap=True)
    for record in manifest.applies:
        table.add_row(
            _time(record["finished_us"]),
            record["kind"],
            _position(record["start"]),
            _position(record["stop"]),
            str(record["tier"]),
            f"{record['rows_in']:,} -> {record['rows_out']:,}",
            f"{_size(record['bytes_in'])} -> {_size(record['bytes_out'])}",
            f"{record['seconds']:.1f}",
        )
    return table


def _applier_line(applier: dict[str, Any]) -> str:
    """A line about the applier if it is merging, has failed or is down; else empty."""
    if applier["state"] == "failed":
        return f"the last merge failed: {applier.get('error', '')}"
    if applier["state"] in ("merging", "down"):
        done = f"{applier.get('tasks_done', 0)} of {applier.get('tasks', 0)} tasks"
        what = f"merging {applier['runs']} runs into a {applier['kind']}, {done}"
        return what if applier["state"] == "merging" else f"{what}; no progress since, perhaps dead"
    return ""


def _position(document: dict[str, int]) -> str:
    return f"{document['scn']}:{document.get('seq', 'end')}"


def _size(count: int) -> str:
    power = 0
    while count >= 1024 ** (power + 1) and power < len(_UNITS) - 1:
        power += 1
    return f"{count / 1024**power:.1f} {_UNITS[power]}" if power else f"{count} B"


def _time(time_us: int) -> str:
    return dt.datetime.fromtimestamp(time_us / 1e6, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
