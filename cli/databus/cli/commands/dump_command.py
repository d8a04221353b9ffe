"""``databus dump``: starts, lists and controls dumps."""

from __future__ import annotations

from typing import Annotated

import typer

from databus.common.errors import BadRequest


def dump(
    url: Annotated[str, typer.Argument(metavar="RELAY_URL/DATABASE")],
    sources: Annotated[str, typer.Option(help="Globs over source names, comma separated.")] = "*",
    where: Annotated[
        str | None, typer.Option(help="A predicate over the columns; only rows that match.")
    ] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="JSON", help='Only these keys: [7, 9], [[1, "a"]].')
    ] = None,
    chunk_rows: Annotated[
        int | None, typer.Option(help="Rows of each chunk, a fixed number.")
    ] = None,
    chunk_ms: Annotated[
        int | None, typer.Option(help="Time that the read of a chunk should take.")
    ] = None,
    delay_ms: Annotated[int | None, typer.Option(help="Pause between two chunks.")] = None,
    share: Annotated[
        int | None,
        typer.Option(help="Percentage of the time in which to read while the stream has changes."),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(help="Number of chunks that are read at once.")
    ] = None,
    watermark_table: Annotated[
        str | None,
        typer.Option(metavar="TABLE", help="Write watermark rows into this table, as in DBLog."),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Show progress until the dump has ended.")] = True,
    list_: Annotated[bool, typer.Option("--list", help="List the dumps instead.")] = False,
    watch: Annotated[str | None, typer.Option(metavar="ID", help="Show this dump.")] = None,
    pause: Annotated[str | None, typer.Option(metavar="ID", help="Pause this dump.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="ID", help="Resume this dump.")] = None,
    cancel: Annotated[str | None, typer.Option(metavar="ID", help="Cancel this dump.")] = None,
) -> None:
    """Send the rows of tables through the stream, as events of op r, without locks.

    Examples:

        databus dump http://127.0.0.1:8700/shop --sources shop.orders
        databus dump http://127.0.0.1:8700/shop --no-wait --chunk-rows 500 --delay-ms 100
        databus dump http://127.0.0.1:8700/shop --list
        databus dump http://127.0.0.1:8700/shop --pause ID
        databus dump http://127.0.0.1:8700/shop --resume ID --parallel 4
    """
    chosen = [bool(one) for one in (list_, watch, pause, resume, cancel)]
    if sum(chosen) > 1:
        raise BadRequest("give one of --list, --watch, --pause, --resume and --cancel")
    pace = {
        "chunk_rows": chunk_rows,
        "chunk_ms": chunk_ms,
        "delay_ms": delay_ms,
        "share": share,
        "parallel": parallel,
    }
    from databus.cli.console import dump_status

    if list_:
        dump_status.list_dumps(url)
    elif watch:
        dump_status.watch_dump(url, watch)
    elif pause or resume:
        state = "paused" if pause else "running"
        dump_status.change_dump(url, pause or resume or "", state, pace)
    elif cancel:
        dump_status.cancel_dump(url, cancel)
    else:
        options: dict[str, object] = {**pace, "where": where, "watermark_table": watermark_table}
        options["keys"] = None if keys is None else dump_status.key_list(keys)
        dump_status.start_dump(url, sources, options, wait=wait)
