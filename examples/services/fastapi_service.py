"""A FastAPI application that holds a table in memory and serves it.

uvicorn --factory fastapi_service:production
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from prometheus_client import CollectorRegistry, make_asgi_app

from databus.client import Consumer, DatabusClient, Event, FileCheckpoints
from databus.client.observing.prometheus_metrics import ClientCollector

READY_LAG_S = 30.0


class Orders(Consumer):
    """The orders by id."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def onDataEvent(self, event: Event) -> None:
        if event.op == "t":
            self.rows.clear()
        elif event.value is None:
            self.rows.pop(event.key["id"], None)
        else:
            self.rows[event.key["id"]] = event.value


def application(client: DatabusClient, orders: Orders) -> FastAPI:
    """The application; the client runs from its start to its end, in the same event loop."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        serving = asyncio.create_task(client.serve())
        yield
        client.stop()
        await serving

    app = FastAPI(lifespan=lifespan)
    registry = CollectorRegistry()
    registry.register(ClientCollector(client))
    app.mount("/metrics", make_asgi_app(registry))

    @app.get("/orders/{number}")
    async def order(number: int) -> dict[str, Any]:
        if number not in orders.rows:
            raise HTTPException(404)
        return {"id": number, "state": orders.rows[number]["state"]}

    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        lag_s = client.status.lag_s
        if lag_s is None or lag_s > READY_LAG_S:
            raise HTTPException(503, f"the lag is {lag_s} s")
        return {"lag_s": lag_s}

    return app


def production() -> FastAPI:
    """The application as a server starts it."""
    orders = Orders()
    client = DatabusClient(
        database="shop",
        sources=["public.orders"],
        relays=["http://127.0.0.1:8700"],
        consumer=orders,
        checkpoints=FileCheckpoints("orders.checkpoint"),
    )
    return application(client, orders)
