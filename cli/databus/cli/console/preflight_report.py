"""The findings of ``databus check``, and their output."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from databus.common.config import Config, DatabaseConfig
from databus.common.errors import (
    PreflightFailed,
)
from databus.common.table_state import CaptureState


async def check(config: Config) -> None:
    """Run each database's preflight and print what it finds.

    Raises:
        PreflightFailed: a finding forbids capture.
    """
    from databus.relay.capture.source_catalogue import create_source
    from databus.relay.columns.ruled_source import RuledSource

    console = Console(soft_wrap=True)
    failed = []
    if not config.database:
        console.print("the file is good; it has no [[database]] to examine", markup=False)
    for database in config.database:
        source = create_source(database)
        tables: dict[str, str] = {}
        try:
            findings = await source.preflight()
            if isinstance(source, RuledSource) and not any(f.fatal for f in findings):
                tables = await source.effective_columns()
        finally:
            await source.close()
        for finding in findings:
            colour = "red" if finding.fatal else "yellow"
            console.print(f"[{colour}]{database.name}[/]: {escape(str(finding))}", highlight=False)
        for name, columns in tables.items():
            console.print(f"{database.name}: {name}: {columns}", markup=False, highlight=False)
        for line in _not_followed(config, database):
            console.print(f"[yellow]{database.name}[/]: {escape(line)}", highlight=False)
        if any(finding.fatal for finding in findings):
            failed.append(database.name)
        else:
            console.print(
                f"[green]{database.name}[/]: ready ({escape(str(database.url))})", highlight=False
            )
    if failed:
        raise PreflightFailed(f"not ready for capture: {', '.join(failed)}")


def _not_followed(config: Config, database: DatabaseConfig) -> Iterator[str]:
    """The tables that the relay on this machine does not follow, by its last record."""
    from databus.relay.dumps.table_records import TableBook, shown
    from databus.relay.ring.data_folder import DatabaseFolder

    if config.relay is None:
        return
    for record in TableBook(DatabaseFolder.of(config.relay.data_dir, database.name).tables):
        table = shown(record, database.name, is_automatic=database.resync == "auto")
        if table.state != CaptureState.FOLLOWED:
            yield f"{table.source} is {table.state} since scn {table.since_scn}: {table.reason}"
            yield f"{table.source}: {table.cure}"
