"""A schema registry for tests: Confluent's REST calls that we use, with backward compatibility.

What it checks is the part of Avro's rules that tests meet: a field that a new version has and the
old one has not needs a default, and a field of both retains its type.  Of Protobuf: the field
with a number retains its type.
"""

from __future__ import annotations

import json
import re
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
                body = json.loads(self.rfile.read(length))
                is_avro = body["schemaType"] == "AVRO"
                schema = json.loads(body["schema"]) if is_avro else body["schema"]
                registry.authorizations.append(self.headers.get("Authorization"))
                parts = [unquote(one) for one in urlsplit(self.path).path.strip("/").split("/")]
                if parts[0] == "compatibility":
                    why = registry.conflicts(parts[2], schema)
                    self._answer(200, {"is_compatible": not why, "messages": why})
                elif registry.conflicts(parts[1], schema):
                    self._answer(409, {"error_code": 409, "message": "incompatible"})
                else:
                    self._answer(200, {"id": registry.add(parts[1], schema)})

            def do_GET(self) -> None:
                subject = unquote(urlsplit(self.path).path.split("/")[2])
                versions = registry.subjects.get(subject)
                if versions is None:
                    self._answer(404, {"error_code": 40401, "message": "no such subject"})
                    return
                schema = registry.schemas[versions[-1] - 1]
                is_text = isinstance(schema, str)
                found = {"schema": schema, "schemaType": "PROTOBUF"}
                self._answer(200, found if is_text else {"schema": json.dumps(schema)})

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
    if isinstance(old, str) or isinstance(new, str):
        was, now = (_types_by_number(one) for one in (old, new))
        return [
            f"the type of {place} was {was[place]} and is {now[place]}"
            for place in was
            if place in now and was[place] != now[place]
        ]
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


def _types_by_number(text: str) -> dict[tuple[str, int], str]:
    """The type of each field of a proto file, by its message and number."""
    found: dict[tuple[str, int], str] = {}
    message = ""
    for line in str(text).splitlines():
        if named := re.match(r"message (\w+) {", line):
            message = named[1]
        elif field := re.match(r"  (?:optional |repeated )?([\w.]+) \w+ = (\d+)", line):
            found[message, int(field[2])] = field[1]
    return found


@pytest.fixture
def registry() -> Iterator[SchemaRegistryServer]:
    """An empty registry."""
    server = SchemaRegistryServer()
    yield server
    server.close()
