"""An aiohttp application that counts the changes of each table."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from aiohttp import web

from databus.client import Consumer, DatabusClient, Event


class Changes(Consumer):
    """How many changes each table had."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def onDataEvent(self, event: Event) -> None:
        self.counts[event.source] += 1


def application(client: DatabusClient, changes: Changes) -> web.Application:
    """The application; the client runs from its start to its end, in the same event loop."""

    async def serving(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(client.serve())
        yield
        client.stop()
        await task

    async def counts(_: web.Request) -> web.Response:
        return web.json_response({"counts": changes.counts, "lag_s": client.status.lag_s})

    app = web.Application()
    app.cleanup_ctx.append(serving)
    app.router.add_get("/counts", counts)
    return app
