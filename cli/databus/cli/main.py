"""The command line.

Exit codes: 0 success, 1 failure, 2 wrong usage or configuration, 3 the preflight found the
database not ready, 4 a comparison (demo, verify) found differences, 5 a migration would break a
reader, 130 ended by ctrl-C, 143 ended by SIGTERM.  ``relay``, ``bootstrap`` and ``apply --every``
serve until a signal: for them SIGTERM gives 0, and so does ctrl-C for the first two.

A command imports its modules when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from databus.cli.commands import (
    checkpoint_command,
    deadletters_command,
    demo_command,
    export_command,
    init_command,
    inspect_command,
    runs_command,
    schema_command,
    verify_command,
)
from databus.cli.commands.bootstrap_command import apply, bootstrap, restore
from databus.cli.commands.check_command import check, doctor, resync, status
from databus.cli.commands.dump_command import dump
from databus.cli.commands.relay_command import relay, reload
from databus.cli.commands.sink_command import sink
from databus.cli.commands.tail_command import tail
from databus.cli.console.command_group import CommandGroup
from databus.common.errors import (
    BadRequest,
    ConfigError,
    DatabusError,
    PreflightFailed,
    ServerUnavailable,
)
from databus.common.extras import extra_of, missing_extra, version

cli = typer.Typer(
    name="databus",
    help="Change data capture: relay, bootstrap server, and the commands that operate them.",
    no_args_is_help=True,
    add_completion=False,
    cls=CommandGroup,
    rich_markup_mode=None,  # Rich and what it imports take longer than all the rest of a start.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
init_command.add_to(cli)
for command in (relay, reload, bootstrap, apply, restore, check, doctor, tail, sink, dump, resync):
    cli.command()(command)
cli.command()(status)
runs_command.add_to(cli)
export_command.add_to(cli)
verify_command.add_to(cli)
demo_command.add_to(cli)
cli.add_typer(checkpoint_command.cli, name="checkpoint")
cli.add_typer(deadletters_command.cli, name="deadletters")
cli.add_typer(inspect_command.cli, name="inspect")
cli.add_typer(schema_command.cli, name="schema")
cli.add_typer(init_command.token, name="token")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"databus {version()}")
        raise typer.Exit


@cli.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Change data capture: relay, bootstrap server, and the commands that operate them."""


EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def exit_code(error: DatabusError) -> int:
    """The exit code for a kind of error, for scripts."""
    if isinstance(error, ConfigError | BadRequest):
        return EXIT_USAGE
    return EXIT_PREFLIGHT if isinstance(error, PreflightFailed) else EXIT_FAILED


def advice(error: DatabusError) -> str:
    """What the user at the terminal does; the error's own hint may be for a server's operator."""
    if type(error) is BadRequest:
        return "`databus COMMAND --help` shows the form, with examples."
    if isinstance(error, ServerUnavailable):
        return "Check the address, and what runs there."
    return error.hint


def app() -> NoReturn:
    """Run the command line; never returns, and never shows a traceback for an error of ours."""
    from databus.cli.console.serving_log import end_on_sigterm

    end_on_sigterm(EXIT_TERMINATED)
    try:
        cli(prog_name="databus")
    except DatabusError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = extra_of(package)
        if extra is None:
            raise  # A fault of the installation, not an extra.
        _fail(missing_extra(extra, [package]))
    except OSError as error:
        print(f"databus: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0)


def _fail(error: DatabusError) -> NoReturn:
    print(f"databus: {error.code}: {error}", file=sys.stderr)
    print(f"  {advice(error)}", file=sys.stderr)
    sys.exit(exit_code(error))
