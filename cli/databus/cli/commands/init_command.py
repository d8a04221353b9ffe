"""``databus init``: a configuration for one database, and the statements that it still needs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from databus.cli.console.command_group import CommandGroup
from databus.common.errors import ConfigError, StoreError
from databus.common.extras import require_extra
from databus.common.private import private_opener

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")

_TEXT = """\
# Made by `databus init`. This file holds the database's password; only your user can read it.
# `databus check {file}` examines the database again.

[relay]
listen = "127.0.0.1:8700"      # where consumers connect
data_dir = "var/relay"         # the rings; a local disk
workers = 1                    # HTTP processes

[[database]]
name = {name}
url = {url}
sources = [{sources}]          # tables to capture, as globs over schema.table
ring_bytes = "256MiB"          # how much of the stream the relay retains
# retention = "24h"            # also bounds the ring by time
# exclude_columns = ["*.password"]   # they never leave the database
# resync = "manual"            # wait for `databus resync` before a suspended table is read again

# The bootstrap server serves consumers that are new, or that fell behind the ring. Needs Java.
[bootstrap]
listen = "127.0.0.1:8701"
data_dir = "var/bootstrap"
relays = ["http://127.0.0.1:8700"]
apply_every = "30s"            # how often Spark merges new changes into the snapshot
"""


def init(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="mariadb://, mysql://, postgresql:// or sqlite:///FILE"),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")
    ] = Path("databus.toml"),
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The database's name in URLs of the relay.")
    ] = None,
) -> None:
    """Write a configuration for a database, and print the statements that the database needs.

    The command changes nothing in the database. The exit code is 3 if a setting forbids capture.
    The command writes the file all the same, and `databus check` shows when the database is ready.

    Examples:

        databus init postgresql://user:secret@localhost/shop
        databus init sqlite:///shop.db --output shop.toml
    """
    import asyncio

    require_extra("relay")
    from databus.cli.console import preflight_report
    from databus.common import config as configuration

    text = _TEXT.format(
        file=output,
        name=json.dumps(name or _name(url)),
        url=json.dumps(url),
        sources=json.dumps(_sources(url)),
    )
    loaded = configuration.parse(text, str(output))
    _write(output, text)
    print(f"wrote {output}")
    asyncio.run(preflight_report.check(loaded))
    print(f"start it: databus relay -c {output}")
    stream = f"http://127.0.0.1:8700/v1/{loaded.database[0].name}/stream?follow=true"
    print(f"read it:  curl -N '{stream}'")


def add_to(cli: typer.Typer) -> None:
    """Add the command to the command line."""
    cli.command()(init)


def _name(url: str) -> str:
    """The database's own name as the relay's name for it; "main" if the URL has none."""
    path = unquote(urlsplit(url).path)
    stem = Path(path).stem if url.startswith("sqlite:") else path.strip("/")
    return _NOT_IN_A_NAME.sub("_", stem).lstrip("_.-")[:63] or "main"


def _sources(url: str) -> str:
    """A glob for all tables of the URL's schema; for all schemas if it names none."""
    scheme, path = url.partition(":")[0], unquote(urlsplit(url).path).strip("/")
    if scheme in ("mariadb", "mysql"):
        return f"{path}.*" if path else "*"
    return {"sqlite": "main.*", "postgresql": "public.*", "postgres": "public.*"}.get(scheme, "*")


def _write(path: Path, text: str) -> None:
    """Make the file, for its user alone.

    Raises:
        ConfigError: the file exists already.
        StoreError: it cannot be written.
    """
    try:
        with open(path, "x", encoding="utf-8", opener=private_opener) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise ConfigError(f"{path} exists. Choose another file: --output FILE.") from None
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error


token = typer.Typer(
    cls=CommandGroup,
    help="Make tokens for the callers of relays and bootstrap servers.",
    no_args_is_help=True,
)


@token.callback()
def _token_group() -> None:
    """Make tokens for the callers of relays and bootstrap servers."""


@token.command()
def make(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the caller.")] = "client",
) -> None:
    """Print a new token, and the section of the configuration with its hash.

    The token goes to the first line of the output, and nowhere else. Store it in a file that only
    the caller's user can read, and name the file as `token_file`.

    Examples:

        databus token make search-index
        databus token make writer > writer.token
    """
    import json
    import sys

    from databus.common.access.authority import hash_of, new_token

    token = new_token()
    print(token)
    section = (
        f"[[auth.tokens]]\nname = {json.dumps(name)}\n"
        f'hashes = ["{hash_of(token)}"]\n'
        'grants = [{ actions = ["read"], databases = ["*"], sources = ["*"] }]'
    )
    print(section, file=sys.stderr)
