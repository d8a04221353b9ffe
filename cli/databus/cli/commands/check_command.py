"""``databus check``: the configuration and the databases, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from databus.cli.console.command_options import load_config
from databus.common.extras import require_extra


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
    from databus.cli.console import preflight_report

    asyncio.run(preflight_report.check(load_config(config)))
