"""Changes as signed HTTP requests."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import aiohttp

from databus.client.sinks.row_changes import RowChanges
from databus.client.sinks.sink import Sink, SinkContext
from databus.client.sinks.sink_batch import SinkBatch
from databus.common.checkpoint import Checkpoint, OnlineCheckpoint, encode
from databus.common.envelopes.plain_envelopes import databus_object
from databus.common.errors import RowRefused, SinkRefused, SinkUnavailable
from databus.common.private import HiddenUrl
from databus.common.sink_config import WebhookSinkConfig

_RETRIED = frozenset({408, 425, 429})
_OF_THE_ROWS = frozenset({400, 409, 413, 422})


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """What ``Databus-Signature`` has: the receiver computes it and compares in constant time."""
    digest = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256)
    return f"sha256={digest.hexdigest()}"


class WebhookSink(Sink):
    """Posts the changes in commit order, at most ``batch_events`` in a request.

    Delivery: at-least-once.  A request that was not answered comes again; (scn, seq) of an event is
    the same each time.

    The body is ``{"database", "sink", "events": [...]}`` with the objects of a relay's NDJSON, and
    with ``resolved`` also ``{"database", "sink", "resolved": checkpoint}`` after each commit.
    An answer 2xx accepts a request.  408, 425, 429 and 5xx are retried, all others stop the sink.

    Owner: one event loop.
    Raises: SinkUnavailable, SinkRefused.
    """

    def __init__(self, config: WebhookSinkConfig) -> None:
        self._config = config
        self._url = HiddenUrl(config.url.reveal)
        self._secret = config.secret.reveal if config.secret else ""
        self._session: aiohttp.ClientSession | None = None
        self._name = self._database = ""
        self._changes = RowChanges()

    async def open(self, context: SinkContext) -> None:
        """Make the session."""
        await self.close()
        self._name, self._database = context.name, context.database
        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout)
        self._session = aiohttp.ClientSession(timeout=timeout)

    async def write(self, batch: SinkBatch) -> None:
        """Post the changes, and wait for each answer."""
        for events in _chunks(self._events(batch), self._config.batch_events):
            await self._post({"events": events})

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Post the resolved position, if that is wanted; the changes are accepted already."""
        if self._config.resolved and isinstance(checkpoint, OnlineCheckpoint):
            await self._post({"resolved": json.loads(encode(checkpoint))})

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _events(self, batch: SinkBatch) -> Iterator[dict[str, Any]]:
        for row in batch.rows():
            yield databus_object(self._database, self._changes.change(row)) | {"target": row.target}

    async def _post(self, content: dict[str, Any]) -> None:
        assert self._session is not None
        document = {"database": self._database, "sink": self._name, **content}
        body = json.dumps(document, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json"}
        if self._secret:
            timestamp = str(int(time.time()))
            headers["Databus-Timestamp"] = timestamp
            headers["Databus-Signature"] = signature(self._secret, timestamp, body)
        try:
            async with self._session.post(
                self._url.reveal, data=body, headers=headers, allow_redirects=False
            ) as answer:
                status = answer.status
                text = (await answer.content.read(200)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SinkUnavailable(f"{self._url} does not answer: {error!r}") from error
        if 200 <= status < 300:
            return
        if status in _RETRIED or status >= 500:
            raise SinkUnavailable(f"{self._url} answered {status}: {text}")
        refusal = RowRefused if status in _OF_THE_ROWS else SinkRefused
        raise refusal(f"{self._url} answered {status}: {text}")


def _chunks(events: Iterator[dict[str, Any]], most: int) -> Iterator[list[dict[str, Any]]]:
    while chunk := list(itertools.islice(events, most)):
        yield chunk
