"""A schema registry with Confluent's REST interface: schemas are registered, ids come back."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from databus.common.errors import SinkRefused, SinkUnavailable

_CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
_MOST_BYTES = 4 << 20
"""Of an answer: a schema is smaller."""
_TIMEOUT_S = 30.0
Schema = dict[str, Any] | str
"""A schema of Avro, or the text of one of Protobuf."""


class SchemaRegistry:
    """Registers schemas under subjects.

    The registry compares a new version with the versions before it, by the compatibility of the
    subject, and refuses one that does not fit.

    Owner: one thread.
    Raises: SinkUnavailable if it does not answer; SinkRefused if it refuses a schema.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        self._url = f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"
        self._headers = {"Content-Type": _CONTENT_TYPE, "Accept": _CONTENT_TYPE}
        if parts.username is not None:
            login = f"{urllib.parse.unquote(parts.username)}:"
            login += urllib.parse.unquote(parts.password or "")
            self._headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"

    def newest(self, subject: str) -> str:
        """The text of a subject's newest Protobuf schema; "" if there is none."""
        name = urllib.parse.quote(subject, safe="")
        status, answer = self._call(f"/subjects/{name}/versions/latest")
        if status == 404 or answer.get("schemaType") != "PROTOBUF":
            return ""
        return str(answer["schema"])

    def register(self, subject: str, schema: Schema) -> int:
        """The id of a schema; it becomes the subject's newest version unless it is one already."""
        body = _body(schema)
        name = urllib.parse.quote(subject, safe="")
        status, answer = self._call(f"/subjects/{name}/versions", body)
        if status == 409:
            why = self._why(name, body, answer)
            raise SinkRefused(
                f"the registry refuses the new schema of {subject}: {why}; change the "
                "compatibility of the subject, or give the source another topic"
            )
        if status != 200 or "id" not in answer:
            raise SinkRefused(f"the registry answers {status} for {subject}: {answer}")
        return int(answer["id"])

    def conflict(self, subject: str, schema: Schema) -> str:
        """Why the subject would refuse a schema; "" if it would not, or has no version yet."""
        body = _body(schema)
        name = urllib.parse.quote(subject, safe="")
        status, answer = self._call(
            f"/compatibility/subjects/{name}/versions/latest?verbose=true", body
        )
        if status == 404 or (status == 200 and answer.get("is_compatible")):
            return ""
        if status != 200:
            raise SinkRefused(f"the registry answers {status} for {subject}: {answer}")
        return "; ".join(map(str, answer.get("messages") or ["it is not compatible"]))

    def _why(self, name: str, body: dict[str, Any], answer: dict[str, Any]) -> str:
        """The reasons, where the registry gives them."""
        status, found = self._call(
            f"/compatibility/subjects/{name}/versions/latest?verbose=true", body
        )
        reasons = found.get("messages") if status == 200 else None
        return "; ".join(map(str, reasons)) if reasons else str(answer.get("message", answer))

    def _call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url.rstrip("/") + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                status, text = answer.status, answer.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read(_MOST_BYTES)
            if status >= 500:
                raise SinkUnavailable(f"the registry {self._url} answers {status}") from error
        except OSError as error:
            raise SinkUnavailable(f"the registry {self._url}: {error}") from error
        try:
            found = json.loads(text)
        except ValueError:
            found = {"message": text.decode(errors="replace")[:200]}
        return status, found if isinstance(found, dict) else {"message": str(found)}


def _body(schema: Schema) -> dict[str, Any]:
    if isinstance(schema, str):
        return {"schema": schema, "schemaType": "PROTOBUF"}
    return {"schema": json.dumps(schema), "schemaType": "AVRO"}
