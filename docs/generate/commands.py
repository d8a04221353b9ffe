"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import typer.main

from databus.cli.main import cli

_INTRODUCTION = """# Command line

`databus COMMAND --help` prints the same texts.

| exit code | meaning |
|---|---|
| 0 | Done. A server ends with 0 on SIGTERM; `relay` and `bootstrap` also on ctrl-C. |
| 1 | The command failed. |
| 2 | Wrong usage or configuration. |
| 3 | The preflight found the database not ready. |
| 4 | A comparison (`demo`, `verify`) found differences. |
| 5 | A migration would break a reader (`schema check`). |
| 130 | Ended by ctrl-C. |
| 143 | Ended by SIGTERM. |
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words: ``inspect ring``."""
    yield from _below(typer.main.get_group(cli), "")


def page() -> str:
    """The page in Markdown."""
    parts = [_INTRODUCTION]
    for words, command in commands():
        parts.append(f"## `databus {words}`\n\n{_help(command)}\n")
        rows = [
            _row(parameter, command) for parameter in command.params if parameter.name != "help"
        ]
        if rows:
            parts.append("| argument or option | default | |\n|---|---|---|\n" + "\n".join(rows))
            parts.append("")
    return "\n".join(parts)


def _below(group: Any, before: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _below(command, f"{before}{name} ")
        else:
            yield before + name, command


def _help(command: Any) -> str:
    """The docstring; what is indented in it is an example for the shell."""
    parts: list[str] = []
    for block in textwrap.dedent(command.help or "").strip().split("\n\n"):
        if block.startswith("    "):
            parts.append(f"```sh\n{textwrap.dedent(block)}\n```")
        else:
            parts.append(block)
    return "\n\n".join(parts)


def _row(parameter: Any, command: Any) -> str:
    """One row: typer itself writes the name, the value's form and the default."""
    name, text = parameter.get_help_record(typer.Context(command))
    default = re.search(r"\[(default: [^\]]*|required)\]$", text)
    shown = default[1].removeprefix("default: ") if default else ""
    text = text[: default.start()] if default else text
    return f"| `{_cell(name)}` | {f'`{_cell(shown)}`' if shown else ''} | {_cell(text)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
