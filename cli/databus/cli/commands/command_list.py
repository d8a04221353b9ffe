"""The list of commands that are plain functions, each in its module."""

from __future__ import annotations

import typer

from databus.cli.commands.bootstrap_command import apply, bootstrap
from databus.cli.commands.check_command import check
from databus.cli.commands.dump_command import dump
from databus.cli.commands.relay_command import relay, reload
from databus.cli.commands.sink_command import sink
from databus.cli.commands.status_command import resync, status
from databus.cli.commands.tail_command import tail


def add_to(cli: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (relay, reload, bootstrap, apply, check, tail, sink, dump, resync, status):
        cli.command()(command)
