"""Requests that schemathesis makes of the OpenAPI documents, against servers that run.

Clients in other languages are generated from these documents: an answer that they do not
describe is a defect of the document or of the server.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from databus.bootstrap.http import bootstrap_endpoints
from databus.common.errors import InternalError
from databus.common.http.openapi_document import Endpoint
from databus.relay.http import relay_endpoints
from tests.support.processes import Processes
from tests.support.system import System, sqlite_shop
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SERVERS = {"relay": relay_endpoints, "bootstrap": bootstrap_endpoints}
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
EXAMPLES = 25
"""Requests of each kind for each endpoint."""


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URL of each server, over an SQLite shop with rows."""
    folder = tmp_path_factory.mktemp("system")
    processes = Processes(folder)
    shop, url = sqlite_shop(folder / "shop.db")
    system = System(folder, shop, url, processes)
    try:
        with shop.session() as step:
            for _ in range(50):
                step()
        system.start_relay()
        bootstrap = system.start_bootstrap("--role", "server")
        system.start_bootstrap("--role", "writer", name="writer")
        bootstrap.wait_ready(f"{system.bootstrap_url}/readyz", 60)
        yield {"relay": system.relay_url, "bootstrap": system.bootstrap_url}
    finally:
        processes.end_all()


REQUESTS = [
    pytest.param(server, endpoint, mode, id=f"{server}-{endpoint.name}-{mode.value}")
    for server, module in SERVERS.items()
    for endpoint in module.ENDPOINTS
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    # An endpoint without parameters and body has no wrong ones.
    if mode is GenerationMode.POSITIVE or endpoint.parameters or endpoint.body
]


def bounded(case: Case) -> Case:
    """The same request, with an answer that ends: no stream is followed, and no wait is long."""
    query = dict(case.query or {})
    query.pop("follow", None)
    for name in ("wait_ms", "batch_ms"):
        if str(query.get(name, "")).isdecimal():
            query[name] = min(int(query[name]), 50)
    case.query = query
    return case


@pytest.mark.parametrize(("server", "endpoint", "mode"), REQUESTS)
def test_every_answer_is_one_that_the_document_describes(
    urls: dict[str, str], server: str, endpoint: Endpoint, mode: GenerationMode
) -> None:
    document = SERVERS[server].document()
    schema = schemathesis.openapi.from_dict(document)
    operation = schema[endpoint.path][endpoint.method]
    fixed = {"db": "shop"} if "{db}" in endpoint.path else {}
    strategy = operation.as_strategy(generation_mode=mode, path_parameters=fixed)
    session = requests.Session()
    answered = []

    @settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(case=strategy)
    def ask(case: Case) -> None:
        case = bounded(case)
        answer = case.call_and_validate(
            base_url=urls[server], session=session, checks=CHECKS, timeout=30 * PATIENCE
        )
        assert answer.status_code != InternalError.status, answer.text
        answered.append(answer.status_code)

    ask()
    assert answered
