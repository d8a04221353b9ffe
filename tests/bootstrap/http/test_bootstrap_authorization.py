"""Which callers may do what at a bootstrap server: every endpoint, and every part of an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from databus.bootstrap.http.bootstrap_endpoints import ENDPOINTS
from databus.bootstrap.http.bootstrap_server import serve_bootstrap
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.process_merges import ProcessMerges
from databus.common.access.grants import EndpointAction, Scope
from databus.common.config import BootstrapConfig
from databus.common.frame.frame_format import iter_frames, source_id
from databus.common.http.admission import Admission
from databus.common.http.listening_socket import listening_socket
from tests.bootstrap.bench import FRAMES, Bench
from tests.support.callers import Callers
from tests.support.recorded_pauses import record_pauses

ACTIONS = {
    "databases": "read", "sources": "read", "register": "read", "start_scn": "read",
    "target_scn": "read", "bootstrap": "read", "changes": "read", "snapshot": "read",
    "splits": "read",
    "status": "monitor", "status_page": "monitor", "metrics": "monitor",
    "openapi": None, "healthz": None, "readyz": None,
}  # fmt: skip
OPEN = {"healthz", "readyz"}
STREAMS = ("bootstrap", "changes", "snapshot")


async def test_every_endpoint_answers_only_callers_with_its_action_and_with_what_is_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "data")
    bench.begin(30)
    bench.write(10)
    bench.seal()
    Applier(bench.store, ProcessMerges(tmp_path)).apply(full=True)
    bench.write(10)
    callers = Callers()
    for action in EndpointAction:
        callers.add(action, {"actions": [str(action)]})
    orders = callers.add("orders", {"actions": ["read"], "sources": ["shop.orders"]})
    callers.add("elsewhere", {"actions": ["read"], "databases": ["hr"]})
    columns = callers.add("columns", {"actions": ["read"], "columns": ["id"]})
    limited = callers.add("limited", {"actions": ["read"]}, max_bytes_per_s="1MiB")
    counted = record_pauses(monkeypatch, 0.001)
    config = BootstrapConfig(data_dir=bench.data_dir, listen="127.0.0.1:0", relays=())
    listener, stop = listening_socket(config.listen), asyncio.Event()
    url = "http://{}:{}".format(*listener.getsockname()[:2])
    admission = Admission(callers.auth)
    serving = asyncio.create_task(
        serve_bootstrap(config, listener, stop, bench.logs, admission=admission)
    )
    try:
        async with aiohttp.ClientSession() as http:
            for endpoint in ENDPOINTS:
                assert endpoint.needs.action == ACTIONS[endpoint.name]
                assert (endpoint.needs.scope is Scope.OPEN) == (endpoint.name in OPEN)
                path = url + endpoint.path.replace("{db}", "shop")
                expected = {"": 401, "elsewhere": 403} | {
                    str(action): 200 if action == ACTIONS[endpoint.name] else 403
                    for action in EndpointAction
                }
                if endpoint.name == "openapi":
                    expected |= dict.fromkeys([*map(str, EndpointAction), "elsewhere"], 200)
                if endpoint.name == "databases":
                    expected["elsewhere"] = 200
                for name, status in expected.items():
                    headers = callers.headers(name) if name else {}
                    async with http.get(path, headers=headers) as answer:
                        body = await answer.text(errors="replace")
                        if endpoint.name in OPEN:
                            assert answer.status == 200
                        else:
                            assert answer.status == status, (endpoint.name, name, body)
                        assert name != "elsewhere" or "shop.orders" not in body or "{db}" in body

            for name in STREAMS:
                path = f"{url}/v1/shop/{name}"
                for query in ({}, {"sources": "*"}, {"sources": "shop.*"}):
                    async with http.get(path, params=query, headers=FRAMES | orders) as answer:
                        assert answer.status == 200, await answer.text()
                        found = {frame.source_id for frame in iter_frames(await answer.read())}
                        assert found == {0, source_id("shop.orders")}
                async with http.get(path, headers=FRAMES | columns) as answer:
                    assert answer.status == 403
                for key in ("sources", "source"):
                    query = {key: "shop.lines"}
                    async with http.get(path, params=query, headers=FRAMES | orders) as answer:
                        expected_status = 400 if (name, key) == ("bootstrap", "source") else 403
                        assert answer.status == expected_status
            path = f"{url}/v1/shop/splits"
            async with http.get(path, headers=columns) as answer:
                assert answer.status == 403
            async with http.get(path, params={"source": "shop.lines"}, headers=orders) as answer:
                assert answer.status == 403
            async with http.get(path, headers=orders) as answer:
                splits = (await answer.json())["splits"]
                assert {split["source"] for split in splits} == {"shop.orders"}
            for name in ("sources", "register", "databases", "startSCN", "nothing"):
                path = f"{url}/v1/databases" if name == "databases" else f"{url}/v1/shop/{name}"
                async with http.get(path, headers=orders) as answer:
                    body = await answer.text()
                    assert "shop.lines" not in body and "shop.notes" not in body
            assert not counted
            for name in STREAMS:
                async with http.get(f"{url}/v1/shop/{name}", headers=FRAMES | limited) as answer:
                    body = await answer.read()
                assert sum(counted) == len(body) > 0
                counted.clear()
            path = f"{url}/v1/shop/register"
            async with http.get(path, params={"sources": "shop.li*"}, headers=orders) as answer:
                assert (answer.status, "shop.lines" in await answer.text()) == (404, False)
    finally:
        stop.set()
        await serving
        bench.logs.close()


@pytest.mark.parametrize("hostile", ["shop.orders,*", "shop.order[s]", "shop.line?"])
def test_globs_never_widen_a_grant(hostile: str) -> None:
    from databus.common.access.grants import Access
    from databus.common.filters.stream_filter import StreamFilter, parse_sources

    narrowed = Access(sources=("shop.orders",)).narrow(StreamFilter(parse_sources(hostile)))
    assert not narrowed.takes_source("shop.lines")
