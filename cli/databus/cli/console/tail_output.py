"""``databus tail``: the stream of a database on standard output."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, cast, get_args

from rich.console import Console

from databus.cli.console.http_client import call, split_database
from databus.client import DatabusClient, RawWindows
from databus.client.client import Start, StartWord
from databus.client.pulling.pull_machine import Verb
from databus.common.errors import BadRequest
from databus.common.http.json_rendering import Renderer
from databus.common.json_text import json_text

_COLUMNS = "{scn:>12} {seq:>5} {op} {source:<24} {key:<28} {after}"

_HEADINGS = {name: name for name in ("scn", "seq", "source", "key", "after")} | {"op": "o"}


def run(
    url: str,
    *,
    bootstraps: list[str],
    sources: str,
    start: str,
    until_idle_s: float | None,
    as_table: bool,
    partition: str | None,
    ops: str | None,
) -> None:
    """Print events until the process is ended; see ``databus tail --help``.

    Raises:
        ServerUnavailable: the relay does not answer at the start; later the client retries.
        BadRequest: an argument is malformed.
    """
    relay, database = split_database(url)
    client = DatabusClient(
        database=database,
        relays=[relay],
        bootstraps=bootstraps,
        sources=sources,
        start=_start(start, bootstraps),
        partition=partition,
        ops=ops,
        client_name="tail",
    )
    # The client retries without end, so a mistyped address would give no output.
    call(f"{relay}/healthz")
    _log_trouble()
    try:
        asyncio.run(_until_terminated(_print(client, until_idle_s, as_table)))
    except BrokenPipeError:
        # The reader of our output (head, less) has closed the pipe; there is nothing to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _log_trouble() -> None:
    """Log the client's failures; the one that ends it is the command's error instead."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("databus.client").addFilter(
        lambda record: not (isinstance(record.args, tuple) and Verb.STOP in record.args)
    )


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``; SIGTERM cancels it, so that its connections are closed, and exits."""
    task = asyncio.ensure_future(work)
    terminated = asyncio.Event()

    def on_sigterm() -> None:
        terminated.set()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
    try:
        await task
    except asyncio.CancelledError:
        if terminated.is_set():
            raise SystemExit(128 + signal.SIGTERM) from None
        raise


def _start(text: str, bootstraps: list[str]) -> Start:
    if text.isdigit():
        return int(text)
    if text == "bootstrap" and not bootstraps:
        raise BadRequest("--from bootstrap needs --bootstrap URL")
    if text in get_args(StartWord):
        return cast("StartWord", text)
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(
            f"--from {text!r} is not one of oldest, latest, bootstrap, an SCN, or a time in ISO "
            "8601 such as 2026-03-01T12:00:00Z"
        ) from None
    # UTC by default, as at the relay.
    return time if time.tzinfo else time.replace(tzinfo=dt.UTC)


async def _print(client: DatabusClient, until_idle_s: float | None, as_table: bool) -> None:
    renderer = Renderer(client.database, client.schemas.by_fingerprint)
    show = _table_row if as_table else json_text
    out = sys.stdout
    if as_table:
        out.write(_COLUMNS.format(**_HEADINGS).rstrip() + "\n")
    async with contextlib.aclosing(_until_idle(client, until_idle_s)) as parts:
        async for part in parts:
            for frame, document in renderer.objects(part.data):
                if frame.is_control and as_table:
                    continue
                out.write(show(document) + "\n")
            out.flush()


async def _until_idle(
    client: DatabusClient, until_idle_s: float | None
) -> AsyncGenerator[RawWindows, None]:
    """The windows, until a relay has sent nothing for ``until_idle_s``."""
    windows = client.raw_windows()
    following: asyncio.Future[RawWindows] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(windows))
            was_flowing = client.status.is_flowing
            while not (await asyncio.wait({following}, timeout=until_idle_s))[0]:
                # Idle time counts only while a relay answers, not while connecting.
                if was_flowing and client.status.is_flowing:
                    return
                was_flowing = client.status.is_flowing
            yield following.result()
    finally:
        # The pending step must end before the generator can be closed.
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await windows.aclose()


def _table_row(document: dict[str, Any]) -> str:
    values = document["after"] if document["after"] is not None else document["before"]
    text = _COLUMNS.format(
        scn=document["scn"],
        seq=document["seq"],
        op=document["op"],
        source=document["source"],
        key=json.dumps(document["key"], ensure_ascii=False),
        after="" if values is None else json.dumps(values, ensure_ascii=False),
    )
    width = Console().width if sys.stdout.isatty() else 200
    return text if len(text) <= width else text[: width - 1] + "…"
