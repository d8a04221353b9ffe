"""The examples of applications that hold a client: each runs, and ends its client in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from aiohttp.test_utils import TestClient, TestServer
from celery import signals
from celery.contrib.testing.worker import start_worker

from databus.client import Position
from databus.client.testing import Recorder
from databus.common.frame.window_builder import heartbeat
from examples.services import aiohttp_service, celery_tasks, fastapi_service, plain_thread
from tests.client.conftest import StartServer
from tests.client.shop import ORDERS, window
from tests.client.test_client import make
from tests.support.waiting import eventually

WINDOWS = [
    window(1, ("c", ORDERS, 1, "new"), ("c", ORDERS, 2, "new")),
    window(2, ("u", ORDERS, 1, "paid"), ("d", ORDERS, 2, None)),
    heartbeat(Position(3, 0), 0),
]


async def test_fastapi_serves_rows_readiness_and_metrics(scripted: StartServer) -> None:
    server = await scripted(*WINDOWS)
    orders = fastapi_service.Orders()
    client = make(orders, server.url)
    app = fastapi_service.application(client, orders)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/ready")).status_code == 503
        async with app.router.lifespan_context(app):
            await eventually(lambda: client.status.lag_s == 0.0, 30)
            assert (await http.get("/orders/1")).json() == {"id": 1, "state": "paid"}
            assert (await http.get("/orders/2")).status_code == 404
            assert (await http.get("/ready")).json() == {"lag_s": 0.0}
            text = (await http.get("/metrics/")).text
            assert 'databus_client_events_total{client="",database="shop"} 4.0' in text
    assert not client.status.is_flowing or client.status.position == Position(3, 0)


async def test_aiohttp_counts_changes(scripted: StartServer) -> None:
    server = await scripted(*WINDOWS)
    changes = aiohttp_service.Changes()
    client = make(changes, server.url)
    app = aiohttp_service.application(client, changes)
    async with TestClient(TestServer(app)) as http:
        await eventually(lambda: client.status.lag_s == 0.0, 30)
        answer = await http.get("/counts")
        assert await answer.json() == {"counts": {"shop.orders": 4}, "lag_s": 0.0}


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Celery leaves the logging of the process as it is: a worker would silence later tests."""

    def keep(**_: object) -> None:
        pass

    signals.setup_logging.connect(keep)
    yield
    signals.setup_logging.disconnect(keep)


@pytest.mark.usefixtures("own_logging")
async def test_a_celery_worker_applies_each_change(scripted: StartServer) -> None:
    server = await scripted(*WINDOWS)
    level = logging.getLogger().level
    celery_tasks.app.conf.update(broker_url="memory://", result_backend="cache+memory://")
    celery_tasks.applied.clear()

    def worked(client: Any) -> None:
        with (
            start_worker(celery_tasks.app, perform_ping_check=False, pool="solo"),
            plain_thread.running(client),
        ):
            asyncio.run(eventually(lambda: len(celery_tasks.applied) == 4, 30))

    await asyncio.to_thread(worked, make(celery_tasks.SendTasks(), server.url))
    assert celery_tasks.applied["1:0"] == ("shop.orders", "c", {"id": 1})
    assert [one[1] for _, one in sorted(celery_tasks.applied.items())] == ["c", "c", "u", "d"]
    assert logging.getLogger().level == level


async def test_a_plain_thread_ends_with_a_last_checkpoint(scripted: StartServer) -> None:
    server = await scripted(*WINDOWS)
    recorder = Recorder()

    def worked() -> bool:
        client = make(recorder, server.url)
        with plain_thread.running(client) as thread:
            asyncio.run(eventually(lambda: client.status.window_count == 2, 30))
        return thread.is_alive()

    assert not await asyncio.to_thread(worked)
    assert recorder.checkpoints[-1].position >= Position(2, 2)
