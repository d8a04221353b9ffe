"""``databus deadletters``: shows events that a consumer could not take, and replays them."""

from __future__ import annotations

import datetime as dt
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from databus.cli.console.command_group import CommandGroup
from databus.common.errors import BadRequest, StoreError
from databus.common.extras import require_extra

if TYPE_CHECKING:
    from databus.client import DatabusClient, DeadLetter, GroupClient
    from databus.client.delivery.dead_letter_replay import Replayed

cli = typer.Typer(
    cls=CommandGroup,
    help="""Show the dead letters of a consumer, and deliver them again.

    Example:

        databus deadletters list shop.deadletters
    """,
    no_args_is_help=True,
)


@cli.command(name="list")
def list_(
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE", help="The file of `FileDeadLetters`, or the URL of a database."
        ),
    ],
    consumer: Annotated[
        str, typer.Option(metavar="NAME", help="The consumer, for a database.")
    ] = "",
    table: Annotated[
        str, typer.Option(metavar="TABLE", help="The table in the database.")
    ] = "databus_dead_letters",
    json_: Annotated[
        bool, typer.Option("--json", help="As JSON with the rows, one object for each letter.")
    ] = False,
) -> None:
    """List the dead letters of a consumer, in the order of the stream.

    `behind` in place of an error: an earlier event of this key has failed. A file must not be in
    use by a client. The URL is `postgresql://`, `mysql://`, `mariadb://` or `sqlite:///FILE`.

    Examples:

        databus deadletters list shop.deadletters
        databus deadletters list sqlite:///shop.db --consumer search --json
    """
    for letter in _letters(store, consumer, table):
        event = _described(letter)
        if json_:
            print(json.dumps(event, ensure_ascii=False))
        else:
            key = json.dumps(event["key"], ensure_ascii=False)
            print(
                f"{letter.position} {letter.op} {letter.source} {key} "
                f"failed {letter.attempt_count} times: {letter.error}"
                if letter.attempt_count
                else f"{letter.position} {letter.op} {letter.source} {key} {letter.error}"
            )


@cli.command()
def replay(
    client: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:CLIENT",
            help="The application's `DatabusClient` or `GroupClient`, or a function that gives it.",
        ),
    ],
) -> None:
    """Call the consumer with its dead letters again. Those that it takes are removed.

    Stop the client, or all members of the group, first. The exit code is 1 if letters are left.

    Example:

        databus deadletters replay shop.consumers:client
    """
    require_extra("client")
    import asyncio

    print_replayed(asyncio.run(_found(client).replay_dead_letters()))


def print_replayed(outcome: Replayed) -> None:
    """Print what a replay has done.  The exit code is 1 if letters are left."""
    print(
        f"{outcome.delivered} delivered, {outcome.failed} failed again, "
        f"{outcome.behind} left behind those"
    )
    if outcome.failed or outcome.behind:
        raise typer.Exit(1)


def _letters(store: str, consumer: str, table: str) -> Sequence[DeadLetter]:
    require_extra("client")
    from databus.cli.console.stored_checkpoints import connecting
    from databus.client import DatabaseDeadLetters, FileDeadLetters

    if "://" in store:
        if not consumer:
            raise BadRequest("a database has the letters of several consumers: give --consumer")
        return DatabaseDeadLetters(consumer, connecting(store), table=table).all()
    if not Path(store).is_file():
        raise StoreError(f"there is no file of dead letters at {store}")
    file = FileDeadLetters(store)
    try:
        return file.all()
    finally:
        file.close()


def _described(letter: DeadLetter) -> dict[str, Any]:
    from databus.client import Options
    from databus.common.schema.column_values import to_json_value

    event = letter.event(Options(objects=False))
    rows = {"key": event.key, "value": event.value, "before": event.before}
    stored = dt.datetime.fromtimestamp(letter.stored_us / 1e6, dt.UTC)
    return {
        "scn": letter.scn,
        "seq": letter.seq,
        "op": letter.op,
        "source": letter.source,
        "error": letter.error,
        "attempts": letter.attempt_count,
        "stored": stored.isoformat(timespec="seconds"),
        **{
            name: row and {column: to_json_value(value) for column, value in row.items()}
            for name, row in rows.items()
        },
    }


def _found(name: str) -> DatabusClient | GroupClient:
    from databus.client import DatabusClient, GroupClient

    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise BadRequest(f"{name!r} is not MODULE:CLIENT, such as shop.consumers:client")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadRequest(f"{name} cannot be imported: {error}") from error
    kinds = (DatabusClient, GroupClient)
    if not isinstance(found, kinds) and callable(found):
        found = found()
    if not isinstance(found, kinds):
        raise BadRequest(
            f"{name} is a {type(found).__name__}, neither a DatabusClient nor a GroupClient"
        )
    return found
