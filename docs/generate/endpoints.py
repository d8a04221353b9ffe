"""The HTTP reference, from the OpenAPI documents of relay and bootstrap server."""

from __future__ import annotations

from typing import Any

from databus.bootstrap.http import bootstrap_endpoints as bootstrap_openapi
from databus.relay.http import relay_endpoints as relay_openapi

_INTRODUCTION = """# HTTP interface

Relay and bootstrap server answer HTTP/1.1. Each serves its own OpenAPI 3.1 document at
`/v1/openapi.json`; this page is made from the two. Errors are problem documents (RFC 9457) with a
stable `code`: see [errors](errors.md). [Reading a relay over HTTP](../streaming.md) explains how a
client uses the stream.
"""


def documents() -> dict[str, dict[str, Any]]:
    """The OpenAPI document of each server."""
    return {"Relay": relay_openapi.document(), "Bootstrap server": bootstrap_openapi.document()}


def page() -> str:
    """The page in Markdown."""
    parts = [_INTRODUCTION]
    for server, document in documents().items():
        parts.append(f"## {server}\n\n{document['info']['description']}\n")
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                parts.append(_operation(server, method.upper(), path, operation))
    return "\n".join(parts)


def _operation(server: str, method: str, path: str, operation: dict[str, Any]) -> str:
    anchor = f"{server.split()[0].lower()}-{operation['operationId']}"
    parts = [f"### `{method} {path}` {{ #{anchor} }}\n\n{operation['summary']}\n"]
    if queries := [one for one in operation["parameters"] if one["in"] == "query"]:
        rows = [_parameter(one) for one in queries]
        parts.append(
            "| parameter | type | | example |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        parts.append("Body, `application/json`:\n\n" + _properties(schema))
    for status, answer in operation["responses"].items():
        if int(status) < 300:
            parts.append(_answer(status, answer))
    codes = [
        f"| {status} | {_codes(answer['description'])} |"
        for status, answer in operation["responses"].items()
        if int(status) >= 300
    ]
    parts.append("| status | errors |\n|---|---|\n" + "\n".join(codes) + "\n")
    return "\n".join(parts)


def _codes(description: str) -> str:
    names = [one.partition(":")[0] for one in description.split("; ") if ":" in one]
    return ", ".join(f"[`{name}`](errors.md#{name})" for name in names)


def _parameter(one: dict[str, Any]) -> str:
    example = f"`{_cell(str(one['example']))}`" if "example" in one else ""
    default = one["schema"].get("default")
    text = _cell(one["description"]) + (f" Default: `{default}`." if default is not None else "")
    return f"| `{one['name']}` | {_type(one['schema'])} | {text} | {example} |"


def _answer(status: str, answer: dict[str, Any]) -> str:
    kinds = ", ".join(f"`{kind}`" for kind in answer.get("content", {}))
    parts = [f"Answer {status}: {kinds or 'no body'}\n"]
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    if schema.get("properties"):
        parts.append(_properties(schema))
    if headers := answer.get("headers"):
        rows = [f"| `{name}` | {_cell(one['description'])} |" for name, one in headers.items()]
        parts.append("| header | |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _properties(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        f"| `{name}` | {_type(one)} | {'yes' if name in required else ''} |"
        for name, one in schema["properties"].items()
    ]
    return "| field | type | always there |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if "oneOf" in schema:
        return " or ".join(_type(one) for one in schema["oneOf"])
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array" and "items" in schema:
        return f"array of {_type(schema['items'])}"
    if kind == "object" and schema.get("properties"):
        return "object: " + ", ".join(f"`{name}`" for name in schema["properties"])
    return str(kind)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
