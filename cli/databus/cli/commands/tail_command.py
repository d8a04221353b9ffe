"""``databus tail`` and ``databus schema``: a database's changes, and the columns of a source."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from databus.cli.console.command_options import seconds
from databus.cli.console.http_client import call
from databus.common.errors import BadRequest, UnknownSource
from databus.common.extras import require_extra

if TYPE_CHECKING:
    from databus.common.schema.source_schema import SourceSchema


def tail(
    url: Annotated[str, typer.Argument(metavar="RELAY_URL/DATABASE")],
    bootstrap: Annotated[
        list[str] | None, typer.Option("--bootstrap", metavar="URL", help="A bootstrap server.")
    ] = None,
    sources: Annotated[str, typer.Option(help="Globs over source names, comma separated.")] = "*",
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="oldest|latest|bootstrap|SCN|TIME",
            help="Where to start; TIME is a commit time in ISO 8601, in UTC if it has no zone.",
        ),
    ] = "oldest",
    until_idle: Annotated[
        str | None,
        typer.Option(
            "--until-idle", metavar="DURATION", help="End after this time without an event."
        ),
    ] = None,
    output: Annotated[str, typer.Option("--format", metavar="json|table")] = "json",
    partition: Annotated[
        str | None,
        typer.Option(metavar="mod:N:A,B|hash:N:A,B|range:SIZE:A-B", help="Only these keys."),
    ] = None,
    ops: Annotated[str | None, typer.Option(metavar="c,u,d,r", help="Only these changes.")] = None,
) -> None:
    """Print the changes of a database as they are committed.

    With `--bootstrap`, the command reads a bootstrap server if the relay no longer has the
    position. Ctrl-C ends it with exit code 130.

    Examples:

        databus tail http://127.0.0.1:8700/shop --from latest
        databus tail http://127.0.0.1:8700/shop --from 2026-03-01T12:00:00Z
        databus tail http://127.0.0.1:8700/shop --sources shop.orders --ops c,d --format table
        databus tail http://127.0.0.1:8700/shop --until-idle 2s \\
            --bootstrap http://127.0.0.1:8701 --from bootstrap
    """
    if output not in ("json", "table"):
        raise BadRequest(f"--format {output!r} is neither json nor table")
    require_extra("client")
    from databus.cli.console import tail_output

    tail_output.run(
        url,
        bootstraps=bootstrap or [],
        sources=sources,
        start=start,
        until_idle_s=None if until_idle is None else seconds("--until-idle", until_idle),
        as_table=output == "table",
        partition=partition,
        ops=ops,
    )


def schema(
    source: Annotated[str, typer.Argument(metavar="SCHEMA.TABLE")],
    relay: Annotated[
        str, typer.Option(metavar="URL", help="A relay or a bootstrap server.")
    ] = "http://127.0.0.1:8700",
    database: Annotated[
        str, typer.Option(metavar="NAME", help="The database; by default, the one that has it.")
    ] = "",
    python: Annotated[
        bool, typer.Option("--python", help="As a Python class for `event.as_`.")
    ] = False,
    form: Annotated[
        str,
        typer.Option("--form", metavar="dataclass|typeddict|pydantic", help="The kind of class."),
    ] = "dataclass",
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Print the columns of a source in their newest version.

    Examples:

        databus schema shop.orders
        databus schema shop.orders --python > orders.py
        databus schema shop.orders --python --form pydantic --relay http://relay-a:8700
    """
    require_extra("client")
    from databus.client.application.row_models import ModelForm, model_code

    found = _newest(relay.rstrip("/"), database, source)
    if python:
        for one in get_args(ModelForm):
            if form == one:
                print(model_code(found, one), end="")
                return
        raise BadRequest(f"--form {form!r} is not one of {', '.join(get_args(ModelForm))}")
    if json_:
        print(json.dumps(found.to_json()))
        return
    for column in found.columns:
        null = "" if column.nullable else " not null"
        key = " key" if column.name in found.key else ""
        print(f"{column.name:<30} {column.kind:<12} {column.type_name}{null}{key}".rstrip())


def _newest(relay: str, database: str, source: str) -> SourceSchema:
    from databus.common.schema.source_schema import SourceSchema

    names = [database] if database else [one["name"] for one in _databases(relay)]
    for name in names:
        answer = call(f"{relay}/v1/{name}/register")
        schemas = [SourceSchema.from_json(one["schema"]) for one in answer["schemas"]]
        versions = [one for one in schemas if one.source == source]
        if versions:
            return versions[-1]
    where = ", ".join(names) or "no database"
    raise UnknownSource(f"{relay} has no schema of {source} ({where})", source=source)


def _databases(relay: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = call(f"{relay}/v1/databases")["databases"]
    return found
