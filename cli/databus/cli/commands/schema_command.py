"""``databus schema``: the columns of a source, and what a migration would break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from databus.cli.console.command_group import CommandGroup
from databus.cli.console.command_options import load_config
from databus.cli.console.http_client import call
from databus.common.errors import BadRequest, ConfigError, UnknownSource
from databus.common.extras import require_extra

if TYPE_CHECKING:
    from databus.cli.gate.gate_findings import FindingKind
    from databus.cli.gate.schema_gate import GateSubject
    from databus.common.config import DatabaseConfig
    from databus.common.schema.source_schema import SourceSchema

EXIT_BREAKS = 5
_RELAY = "http://127.0.0.1:8700"


class ShownByDefault(CommandGroup):
    """``databus schema SOURCE`` is ``databus schema show SOURCE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert ``show`` if no command of the group is named."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["show", *args]
        return super().parse_args(ctx, args)


cli = typer.Typer(
    cls=ShownByDefault,
    help="The columns of a source, and what a migration would break.",
    no_args_is_help=True,
)

RelayOption = Annotated[str, typer.Option(metavar="URL", help="A relay or a bootstrap server.")]
DatabaseOption = Annotated[
    str, typer.Option(metavar="NAME", help="The database; by default, the one that there is.")
]


@cli.command()
def show(
    source: Annotated[str, typer.Argument(metavar="SCHEMA.TABLE")],
    relay: RelayOption = _RELAY,
    database: DatabaseOption = "",
    python: Annotated[
        bool, typer.Option("--python", help="As a Python class for `event.as_`.")
    ] = False,
    form: Annotated[
        str,
        typer.Option("--form", metavar="dataclass|typeddict|pydantic", help="The kind of class."),
    ] = "dataclass",
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Print the columns of a source in their newest version. The word `show` may be left out.

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


@cli.command()
def save(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    relay: RelayOption = _RELAY,
    database: DatabaseOption = "",
) -> None:
    """Save all versions of a database's sources, for `databus schema check --schemas FILE`.

    Example:

        databus schema save shop.schemas.json --relay http://relay-a:8700 --database shop
    """
    require_extra("client")
    document = _registered(relay.rstrip("/"), database)
    file.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{file}: {len(document['schemas'])} versions of database {document['database']}")


@cli.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="MIGRATION.sql...")],
    relay: RelayOption = _RELAY,
    database: DatabaseOption = "",
    schemas: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `databus schema save` wrote, instead of a relay."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="The relay's configuration: rules and options."
        ),
    ] = None,
    sink: Annotated[
        list[Path] | None,
        typer.Option("--sink", metavar="FILE", help="A sink's configuration; repeatable."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="SOURCE=MODULE:CLASS",
            help="A class that a consumer makes of rows with `event.as_`; repeatable.",
        ),
    ] = None,
    schema: Annotated[
        str, typer.Option(metavar="NAME", help="The schema of names without one.")
    ] = "",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="suspended|emptied|columns|resolution|sink|registry|consumer|unknown",
            help="A kind of break that is intended; repeatable.",
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Report what migrations would break, before they run; change nothing.

    The files are read as statements of MariaDB, MySQL or PostgreSQL, in the order given, and
    compared with the sources of the relay, with sinks and their schema registry, and with classes
    of consumers. A statement that is not understood is a break. The exit code is 5 if there is a
    break that `--allow` does not name.

    Examples:

        databus schema check migration.sql --relay http://relay-a:8700 --database shop
        databus schema check migration.sql -c databus.toml --sink search.toml --json
        databus schema check V7.sql V8.sql --schemas shop.schemas.json --allow suspended
    """
    require_extra("relay")
    require_extra("client")
    from databus.cli.gate import gate_report
    from databus.cli.gate.migration_files import read_migration
    from databus.cli.gate.schema_gate import SchemaGate

    allowed = _kinds(allow or [])
    chosen = _chosen(config, database)
    name = chosen.name if chosen is not None else database
    document = _registered(relay.rstrip("/"), name) if schemas is None else _saved(schemas)
    subject = _subject(document, chosen, config, sink or [], model or [], schema)
    gate = SchemaGate(subject)
    reports = [
        gate.check(statement)
        for file in files
        for statement in read_migration(
            str(file), _text(file), is_postgres=subject.product == "postgresql"
        )
    ]
    readers = [] if schemas is not None else _readers(relay.rstrip("/"), document["database"])
    show_ = gate_report.print_json if json_ else gate_report.print_text
    show_(document["database"], reports, allowed, readers)
    if gate_report.break_count(reports, allowed):
        raise typer.Exit(EXIT_BREAKS)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{file} is not UTF-8: {error}") from None


def _kinds(names: list[str]) -> list[FindingKind]:
    from databus.cli.gate.gate_findings import BREAKS, FindingKind

    known = [kind.value for kind in BREAKS]
    for name in names:
        if name not in known:
            raise BadRequest(f"--allow {name!r} is not one of {', '.join(known)}")
    return [FindingKind(name) for name in names]


def _chosen(path: Path | None, database: str) -> DatabaseConfig | None:
    """The database of the configuration that the migration is for."""
    if path is None:
        return None
    databases = load_config(path).database
    found = [one for one in databases if database in ("", one.name)]
    if len(found) != 1:
        names = ", ".join(one.name for one in databases) or "none"
        raise BadRequest(f"{path} has the databases {names}: give --database NAME of one of them")
    return found[0]


def _saved(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        found = {key: document[key] for key in ("database", "clock", "schemas")}
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"{path} is not what `databus schema save` writes: {error!r}") from None
    return found


def _subject(
    document: dict[str, Any],
    chosen: DatabaseConfig | None,
    config: Path | None,
    sinks: list[Path],
    models: list[str],
    schema: str,
) -> GateSubject:
    from databus.cli.gate.model_checks import model_check
    from databus.cli.gate.schema_gate import GateSubject
    from databus.cli.gate.sink_effects import SinkCheck
    from databus.cli.gate.table_effects import CaptureRules
    from databus.common.envelopes.frame_changes import product_of
    from databus.common.schema.source_schema import SourceSchema
    from databus.relay.columns.column_rules import ColumnRules

    product = product_of(document["clock"])
    checks = []
    for path in sinks:
        section = load_config(path).sink
        if section is None:
            raise ConfigError(f"{path}: there is no [sink] section")
        if section.database == document["database"]:
            checks.append(SinkCheck(section, product))
    rules = CaptureRules()
    if chosen is not None:
        rules = CaptureRules(
            zero_dates=str(chosen.options.get("zero_dates", rules.zero_dates)),
            special_values=str(chosen.options.get("special_values", rules.special_values)),
        )
    return GateSubject(
        product=product,
        versions=[SourceSchema.from_json(one["schema"]) for one in document["schemas"]],
        default_schema=schema,
        rules=rules,
        captures=chosen.captures if chosen is not None else lambda _: True,
        column_rules=ColumnRules(chosen) if chosen is not None else None,
        sinks=checks,
        models=[model_check(one) for one in models],
    )


def _registered(relay: str, database: str) -> dict[str, Any]:
    """The answer of ``/register``."""
    names = [database] if database else [one["name"] for one in _databases(relay)]
    if len(names) != 1:
        raise BadRequest(f"{relay} has the databases {', '.join(names)}: give --database NAME")
    return call(f"{relay}/v1/{names[0]}/register")


def _readers(relay: str, database: str) -> list[str]:
    """The names of the clients that the relay has counted."""
    found = call(f"{relay}/v1/status").get("databases", [])
    one: dict[str, Any] = next((one for one in found if one.get("name") == database), {})
    return sorted(str(client["name"]) for client in one.get("clients", []) if client.get("name"))


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
