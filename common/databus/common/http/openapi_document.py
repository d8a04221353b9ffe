"""The OpenAPI document of a server, built from a table of its endpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from databus.common.access.grants import ANYONE, OPEN, EndpointAction, Need, Scope
from databus.common.errors import (
    BadRequest,
    DatabusError,
    Forbidden,
    ForeignHost,
    ForeignOrigin,
    InternalError,
    RequestTimeout,
    ServerUnavailable,
    TooManyRequests,
    Unauthenticated,
    UnsupportedMediaType,
    registry,
)
from databus.common.http.request_parameters import Parameter
from databus.common.http.stream_formats import FRAMES_TYPE

DISTRIBUTION = "databus-cdc"

INTEGER = {"type": "integer"}
TEXT = {"type": "string"}
POSITION = {"type": "object", "properties": {"scn": INTEGER, "seq": INTEGER}}


def whole_object(
    properties: Mapping[str, Any], optional: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The schema of an object that has all of ``properties``, and perhaps some of ``optional``."""
    return {
        "type": "object",
        "required": sorted(properties),
        "properties": {**properties, **(optional or {})},
    }


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path.

    The method ``answer_<name>`` of a handlers' object answers it, or the one that ``handler``
    names.  ``answer`` is the JSON schema of a JSON answer; ``produces`` the types of any other.
    ``errors`` are those besides 400 and 500, which every endpoint has.  ``needs`` is what the
    caller must have a grant for.
    """

    method: str
    path: str
    name: str
    summary: str
    parameters: tuple[Parameter, ...] = ()
    status: int = 200
    answer: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    produces: tuple[str, ...] = ("application/json",)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    errors: tuple[type[DatabusError], ...] = ()
    handler: str = ""
    needs: Need = field(kw_only=True)

    @property
    def is_stream(self) -> bool:
        """Whether the answer's length is unknown in advance; such an endpoint has no HEAD."""
        return FRAMES_TYPE in self.produces


_MONITOR = Need(Scope.SERVER, EndpointAction.MONITOR)


def operations(server: str, ready_when: str) -> tuple[Endpoint, ...]:
    """The endpoints of every server for operators: state, health, metrics."""
    return (
        Endpoint(
            "GET",
            "/v1/status",
            "status",
            f"The whole state of the {server}.",
            needs=_MONITOR,
        ),
        Endpoint(
            "GET",
            "/status",
            "status_page",
            "The same as a page for browsers.",
            produces=("text/html",),
            needs=_MONITOR,
        ),
        Endpoint("GET", "/v1/openapi.json", "openapi", "This document.", needs=ANYONE),
        Endpoint("GET", "/healthz", "healthz", "Whether the process answers.", needs=OPEN),
        Endpoint("GET", "/readyz", "readyz", ready_when, errors=(ServerUnavailable,), needs=OPEN),
        Endpoint(
            "GET",
            "/metrics",
            "metrics",
            "Prometheus metrics.",
            produces=("text/plain",),
            needs=_MONITOR,
        ),
    )


def version() -> str:
    """The version of the installed distribution."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0"


def document(title: str, description: str, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "description": description, "version": version()},
        "paths": paths,
        "components": {"schemas": {"Problem": _problem_schema()}},
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": [
            *(_path_parameter(name) for name in re.findall(r"{(\w+)}", endpoint.path)),
            *(_query_parameter(parameter) for parameter in endpoint.parameters),
        ],
        "responses": {str(endpoint.status): _answer(endpoint), **_problems(endpoint)},
    }
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": endpoint.body}},
        }
    return operation


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameter(parameter: Parameter) -> dict[str, Any]:
    described = {
        "name": parameter.name,
        "in": "query",
        "required": False,
        "description": parameter.description,
        "schema": dict(parameter.schema),
    }
    return described if parameter.example is None else {**described, "example": parameter.example}


def _answer(endpoint: Endpoint) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.produces:
        answer["content"] = {
            kind: {"schema": dict(endpoint.answer)} if kind == "application/json" else {}
            for kind in endpoint.produces
        }
    if endpoint.headers:
        answer["headers"] = {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in endpoint.headers.items()
        }
    return answer


def _problems(endpoint: Endpoint) -> dict[str, Any]:
    by_status: dict[int, list[type[DatabusError]]] = {}
    errors: tuple[type[DatabusError], ...] = (BadRequest, *endpoint.errors, InternalError)
    if endpoint.needs.scope is not Scope.OPEN:
        errors += (Unauthenticated, Forbidden, TooManyRequests)
    if endpoint.method != "GET":
        errors += (ForeignHost, ForeignOrigin)
    if endpoint.body is not None:
        errors += (RequestTimeout, UnsupportedMediaType)
    for error in errors:
        by_status.setdefault(error.status, []).append(error)
    return {
        str(status): {
            "description": "; ".join(
                f"{error.code}: {(error.__doc__ or '').splitlines()[0]}" for error in group
            ),
            "content": {
                "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
            },
        }
        for status, group in sorted(by_status.items())
    }


def _problem_schema() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "type": "object",
        "description": "An error, RFC 9457; code is stable.",
        "required": ["type", "title", "status", "detail", "code", "retry", "hint"],
        "properties": {
            "type": text,
            "title": text,
            "status": {"type": "integer"},
            "detail": text,
            "code": {"type": "string", "enum": sorted(registry())},
            "retry": {"type": "boolean"},
            "hint": text,
        },
        "additionalProperties": True,
    }
