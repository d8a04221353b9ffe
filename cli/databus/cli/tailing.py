"""``databus tail``: the stream of a database on standard output."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from rich.console import Console

from databus.cli.web import split_database
from databus.client import DatabusClient, RawWindows
from databus.common.errors import BadRequest
from databus.common.rendering import Renderer, to_line

_COLUMNS = "{scn:>12} {seq:>5} {op} {source:<24} {key:<28} {after}"


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
    """Print events until nobody wants more; see ``databus tail --help``."""
    relay, database = split_database(url)
    client = DatabusClient(
        database=database,
        relays=[relay],
        bootstraps=bootstraps,
        sources=sources,
        start=_start(start, bootstraps),
        partition=partition,
        ops=ops,
    )
    asyncio.run(_print(client, until_idle_s, as_table))


def _start(text: str, bootstraps: list[str]) -> str | int:
    if text.isdigit():
        return int(text)
    if text not in ("oldest", "latest", "bootstrap"):
        raise BadRequest(f"--from {text!r} is none of oldest, latest, bootstrap, or an SCN")
    if text == "bootstrap" and not bootstraps:
        raise BadRequest("--from bootstrap needs --bootstrap URL")
    return text


async def _print(client: DatabusClient, until_idle_s: float | None, as_table: bool) -> None:
    renderer = Renderer(client.database, client.schemas.by_fingerprint)
    show = _table_row if as_table else to_line
    out = sys.stdout
    async for part in _until_idle(client, until_idle_s):
        for frame, document in renderer.objects(part.data):
            if frame.is_control and as_table:
                continue
            out.write(show(document) + "\n")
        out.flush()


async def _until_idle(
    client: DatabusClient, until_idle_s: float | None
) -> AsyncIterator[RawWindows]:
    """The windows, until a relay has had nothing to send for so long."""
    windows = client.raw_windows()
    while True:
        following = asyncio.ensure_future(anext(windows))
        while not (await asyncio.wait({following}, timeout=until_idle_s))[0]:
            # Silence counts only once a relay answers: before, we are still on the way there.
            if client.status.is_flowing:
                following.cancel()
                return
        yield following.result()


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
