"""``databus checkpoint``: shows and changes the checkpoint of a consumer."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Annotated

import typer

from databus.cli.console.command_group import CommandGroup
from databus.common.checkpoint import Checkpoint, OnlineCheckpoint, Position, decode, encode
from databus.common.errors import BadRequest, ClockMismatch
from databus.common.extras import require_extra

if TYPE_CHECKING:
    from databus.cli.console.stored_checkpoints import Stored

_SILENCE_S = 30.0

cli = typer.Typer(
    cls=CommandGroup,
    help="""Show and change the checkpoints of consumers.

    STORE is the file of `FileCheckpoints`, the folder of `LmdbCheckpoints`, or the URL of the
    database with the table of `DatabaseCheckpoints`: `postgresql://`, `mysql://`, `mariadb://`,
    `sqlite:///FILE`.

    Stop the consumer before you change its checkpoint. A consumer that runs with
    `DatabaseCheckpoints` stops by itself at its next checkpoint. One with a file holds a lock, and
    the command ends with `store_busy`. With LMDB nothing prevents the change, and a consumer that
    runs overwrites it.

    Example:

        databus checkpoint show shop.checkpoint
    """,
    no_args_is_help=True,
)
Store = Annotated[str, typer.Argument(metavar="STORE", help="A file, a folder, or a URL.")]
Consumer = Annotated[
    str, typer.Option("--consumer", metavar="NAME", help="The consumer; a file has only one.")
]
Table = Annotated[str, typer.Option(metavar="TABLE", help="The table in the database.")]
_TABLE = "databus_checkpoints"


@cli.command()
def show(
    store: Store,
    consumer: Consumer = "",
    table: Table = _TABLE,
    json_: Annotated[
        bool, typer.Option("--json", help="As JSON, one object for each consumer.")
    ] = False,
) -> None:
    """Show the checkpoint of a consumer, or of all consumers of a store.

    Examples:

        databus checkpoint show shop.checkpoint
        databus checkpoint show postgresql://app@db/shop --consumer search --json
    """
    found = [one for one in _all(store, table) if consumer in ("", one.consumer)]
    if consumer and not found:
        raise BadRequest(f"the store has no consumer {consumer!r}")
    for one in found:
        text = "" if one.checkpoint is None else encode(one.checkpoint)
        if json_:
            document = json.loads(text) if text else None
            print(json.dumps({"consumer": one.consumer, "updated": one.updated or None,
                              "owner": one.owner or None, "checkpoint": document}))  # fmt: skip
        else:
            name = f"{one.consumer}: " if one.consumer else ""
            print(f"{name}{text or 'nothing finished yet'}")
            if one.updated:
                print(f"  stored at {one.updated} UTC by {one.owner or 'an operator'}")


@cli.command(name="set")
def set_(
    store: Store,
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="The JSON text that `show` prints.")
    ],
    consumer: Consumer = "",
    table: Table = _TABLE,
) -> None:
    """Store a checkpoint, whatever is there. The consumer continues after it.

    Example:

        databus checkpoint set shop.checkpoint \\
            '{"v": 1, "db": "shop", "clock": "mariadb:0:shop", "mode": "online", "scn": 812}'
    """
    _replace(store, table, consumer, decode(checkpoint))


@cli.command()
def rewind(
    store: Store,
    to: Annotated[
        str,
        typer.Option(
            metavar="SCN|TIME", help="A commit time is in ISO 8601, in UTC if it has no zone."
        ),
    ],
    relay: Annotated[
        str, typer.Option(metavar="URL", help="The relay that finds the position of a time.")
    ] = "",
    consumer: Consumer = "",
    table: Table = _TABLE,
) -> None:
    """Move a checkpoint back, so that the consumer receives again what follows.

    With an SCN, the consumer continues after that commit. With a time, it continues with the
    first window that was committed then or later. If the relay no longer has the position, the
    consumer reads a bootstrap server.

    Examples:

        databus checkpoint rewind shop.checkpoint --to 812
        databus checkpoint rewind postgresql://app@db/shop --consumer search \\
            --to 2026-03-01T12:00:00Z --relay http://127.0.0.1:8700
    """
    found = [one for one in _all(store, table) if one.consumer == consumer]
    before = found[0].checkpoint if found else None
    if before is None:
        raise BadRequest(
            f"the store has no checkpoint of consumer {consumer!r}; `databus checkpoint show` "
            "lists those that it has"
        )
    position = _position_at(relay, before, to)
    if position > before.position:
        raise BadRequest(
            f"--to {to} is {position}, after the checkpoint {before.position}: the consumer would "
            "lose what lies between. To skip it all the same, use `databus checkpoint set`."
        )
    _replace(store, table, consumer, OnlineCheckpoint(before.database, before.clock, position))


def _all(store: str, table: str) -> list[Stored]:
    require_extra("client")
    from databus.cli.console import stored_checkpoints

    return stored_checkpoints.opened(store, table).all()


def _replace(store: str, table: str, consumer: str, checkpoint: Checkpoint) -> None:
    require_extra("client")
    from databus.cli.console import stored_checkpoints

    access = stored_checkpoints.opened(store, table)
    before = [one for one in access.all() if one.consumer == consumer]
    if not before and not consumer:
        raise BadRequest("the store has consumers with names: give --consumer NAME")
    access.set(consumer, checkpoint)
    was = before[0].checkpoint if before else None
    print(f"was {encode(was) if was else 'not there'}")
    print(f"is  {encode(checkpoint)}")


def _position_at(relay: str, before: Checkpoint, text: str) -> Position:
    """The position that is given, or the one before the first window of a commit time."""
    from databus.common.http.peer_calls import peer_call
    from databus.common.http.request_parameters import parse_position, parse_time

    with contextlib.suppress(BadRequest):
        return parse_position(text)
    query = {"start_time": str(parse_time(text)), "wait_ms": "0", "max_bytes": "1"}
    if not relay:
        raise BadRequest("--to with a time needs --relay URL, which finds its position")
    path = f"/v1/{before.database}/stream"
    with peer_call("GET", relay.rstrip("/"), path, query=query, silence_s=_SILENCE_S) as answer:
        clock, start = answer.headers.get("Databus-Clock"), answer.headers.get("Databus-Start")
    if clock != before.clock:
        raise ClockMismatch(
            f"{relay} reads the clock {clock!r}, the checkpoint is of {before.clock!r}"
        )
    return parse_position(start or "")
