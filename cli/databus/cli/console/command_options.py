"""Options that several commands have: the configuration file, and durations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from databus.common.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    from databus.common.config import BootstrapConfig, Config


ConfigPath = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="The configuration file, TOML.")
]

LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format",
        metavar="text|json",
        envvar="DATABUS_LOG_FORMAT",
        help="Log lines as text, or as a JSON object a line.",
    ),
]


def load_config(path: Path) -> Config:
    """The configuration in a file."""
    from databus.common import config

    return config.load(path)


def bootstrap_section(path: Path) -> BootstrapConfig:
    """The section of the bootstrap server.

    Raises:
        ConfigError: the file does not have it.
    """
    section = load_config(path).bootstrap
    if section is None:
        raise ConfigError(f"{path}: there is no [bootstrap] section")
    return section


def seconds(option: str, text: str) -> float:
    """The duration that an option gives, in seconds."""
    from databus.common.config import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise BadRequest(f"{option}: {error}") from None
