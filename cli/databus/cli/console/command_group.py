"""The help of commands as plain text, with its examples line by line.

What is not here: the texts; they are the docstrings of the commands.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

_KEPT = "\b\n"
"""Before a paragraph whose line breaks stay."""


class CommandGroup(TyperGroup):
    """Commands whose help is readable in any terminal.

    Owner: typer, which makes one for each group.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, whose examples keep their lines."""
        found = super().get_command(ctx, cmd_name)
        if found is not None and found.help:
            found.help = with_lines(found.help)
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands, each with its whole summary."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _summary(one)) for name, one in found if not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def with_lines(text: str) -> str:
    """A help text, of whose paragraphs those that are indented are not filled."""
    parts = text.split("\n\n")
    return "\n\n".join(_KEPT + part if part.startswith("    ") else part for part in parts)


def _summary(command: Any) -> str:
    return " ".join((command.help or "").partition("\n\n")[0].split())
