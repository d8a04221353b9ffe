"""A schema registry for tests: Confluent's REST calls that we use, with backward compatibility.

What it checks is the part of Avro's rules that tests meet: a field that a new version has and the
old one has not needs a default, and a field of both retains its type.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


class SchemaRegistryServer:
    """Registered schemas by id, and by subject in the order of their versions."""

    def __init__(self) -> None:
        self.schemas: list[Any] = []
        self.subjects: dict[str, list[int]] = {}
        self.authorizations: list[str | None] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                schema = json.loads(json.loads(self.rfile.read(length))["schema"])
                registry.authorizations.append(self.headers.get("Authorization"))
                parts = [unquote(one) for one in urlsplit(self.path).path.strip("/").split("/")]
                if parts[0] == "compatibility":
                    why = registry.conflicts(parts[2], schema)
                    self._answer(200, {"is_compatible": not why, "messages": why})
                elif registry.conflicts(parts[1], schema):
                    self._answer(409, {"error_code": 409, "message": "incompatible"})
                else:
                    self._answer(200, {"id": registry.add(parts[1], schema)})

            def _answer(self, status: int, document: Any) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.address}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def add(self, subject: str, schema: Any) -> int:
        """The id of a schema: equal schemas have one."""
        if schema not in self.schemas:
            self.schemas.append(schema)
        number = self.schemas.index(schema) + 1
        versions = self.subjects.setdefault(subject, [])
        if number not in versions:
            versions.append(number)
        return number

    def conflicts(self, subject: str, schema: Any) -> list[str]:
        """Why a schema cannot read what the newest version wrote."""
        if not (versions := self.subjects.get(subject)):
            return []
        return _conflicts(self.schemas[versions[-1] - 1], schema)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _conflicts(old: Any, new: Any) -> list[str]:
    if isinstance(old, list) and isinstance(new, list):
        return [why for one, two in zip(old, new, strict=False) for why in _conflicts(one, two)]
    if not (
        isinstance(old, dict) and isinstance(new, dict) and "fields" in old and "fields" in new
    ):
        kinds = (one.get("type") if isinstance(one, dict) else one for one in (old, new))
        before, after = kinds
        return [] if before == after else [f"the type {before} became {after}"]
    known = {field["name"]: field for field in old["fields"]}
    found = []
    for field in new["fields"]:
        if field["name"] in known:
            found += _conflicts(known[field["name"]]["type"], field["type"])
        elif "default" not in field:
            found.append(f"the field {field['name']} has no default")
    return found


@pytest.fixture
def registry() -> Iterator[SchemaRegistryServer]:
    """An empty registry."""
    server = SchemaRegistryServer()
    yield server
    server.close()
