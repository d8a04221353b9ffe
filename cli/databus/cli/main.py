"""The command line.

Exit codes: 0 done, 1 it failed, 2 wrong usage or configuration, 3 the preflight found the
database not ready, 4 the demo's comparison found differences, 130 ended by ctrl-C.
"""

from __future__ import annotations

import os
import sys

import click
import typer

from databus.cli import commands, demo_command, inspection
from databus.common.errors import BadRequest, ConfigError, DatabusError, PreflightFailed

cli = typer.Typer(
    name="databus",
    help="Change data capture: relay, bootstrap server, and what one does with them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
commands.add_to(cli)
demo_command.add_to(cli)
cli.add_typer(inspection.cli, name="inspect")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
EXIT_INTERRUPTED = 130


def exit_code(error: DatabusError) -> int:
    """The exit code that tells a script what kind of error it was."""
    if isinstance(error, ConfigError | BadRequest):
        return EXIT_USAGE
    return EXIT_PREFLIGHT if isinstance(error, PreflightFailed) else EXIT_FAILED


def app() -> None:
    """Run the command line; never returns, and never shows a traceback for an error of ours."""
    try:
        code = cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except DatabusError as error:
        print(f"databus: {error.code}: {error}", file=sys.stderr)
        print(f"  {error.hint}", file=sys.stderr)
        sys.exit(exit_code(error))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output (head, less) has had enough; nothing is left to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)
