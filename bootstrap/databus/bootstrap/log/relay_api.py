"""The relay's JSON endpoints that the log writer needs: ranges, sources, dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from databus.common.access.credentials import Credentials
from databus.common.checkpoint import Position, decode_position
from databus.common.config import BootstrapConfig
from databus.common.errors import BadCheckpoint, DatabusError, ServerUnavailable
from databus.common.http.peer_client import PeerClient
from databus.common.private import HiddenUrl

_ANSWER_S = 15.0


def credentials_of(config: BootstrapConfig) -> Credentials:
    """What the log writer presents to the relays."""
    return Credentials(**config.credentials.model_dump())


class RelayApi:
    """Requests to the relays, one after another; the relay that answered last comes first.

    Only the relay that makes a dump has its state, so no other is used as long as that one
    answers.

    Owner: one event loop; ``async with`` opens and closes its connections.
    Raises: ServerUnavailable if none answers; the error that a relay answered with.
    """

    def __init__(self, relays: Sequence[str], credentials: Credentials | None = None) -> None:
        self._relays = [HiddenUrl(relay.rstrip("/")) for relay in relays]
        self._first = 0
        self._http = PeerClient(answer_s=_ANSWER_S, credentials=credentials)

    async def __aenter__(self) -> Self:
        self._http.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def databases(self) -> list[str]:
        """The names of the databases that the relay serves."""
        document = await self._request("GET", "/v1/databases")
        try:
            return [str(item["name"]) for item in document["databases"]]
        except (KeyError, TypeError) as error:
            raise self._odd("/v1/databases", error) from error

    async def sources(self, database: str) -> Mapping[str, Any]:
        """The sources with the range and clock of the stream."""
        path = f"/v1/{database}/sources"
        document = await self._request("GET", path)
        try:
            _ = [item["name"] for item in document["sources"]]
            for name in ("prev", "max"):
                decode_position(document[name])
            return {**document, "clock": str(document["clock"])}
        except (KeyError, TypeError, BadCheckpoint) as error:
            raise self._odd(path, error) from error

    def _odd(self, path: str, error: Exception) -> ServerUnavailable:
        what = error.message if isinstance(error, DatabusError) else f"without {error}"
        return ServerUnavailable(f"{self.current}{path} answered something else: {what}")

    @property
    def current(self) -> str:
        """The relay that answered last."""
        return self._relays[self._first]

    async def report(self, database: str, by: str, patterns: Sequence[str]) -> Mapping[str, Any]:
        """Report that ``by`` repairs suspended tables; returns the table states."""
        body = {"action": "present", "by": by, "sources": list(patterns)}
        return await self._request("POST", f"/v1/{database}/tables", body)

    async def start_dump(
        self,
        database: str,
        sources: Sequence[str],
        reader: Position,
        after: Mapping[str, Sequence[Any]] | None = None,
    ) -> Mapping[str, Any]:
        """Request a dump of tables, which waits for the reader that is at ``reader``.

        By source, ``after`` has the key after which it begins.
        """
        body = {"sources": list(sources), "reader": reader.to_json()}
        if after:
            body["after"] = dict(after)
        return await self._request("POST", f"/v1/{database}/dumps", body)

    async def dump(
        self, database: str, dump: str, reader: Position, *, resume: bool = False
    ) -> Mapping[str, Any]:
        """Report to a dump up to where it was read; returns its state."""
        body = {"reader": reader.to_json(), **({"state": "running"} if resume else {})}
        return await self._request("PATCH", f"/v1/{database}/dumps/{dump}", body)

    async def cancel_dump(self, database: str, dump: str) -> None:
        """Cancel a dump."""
        await self._request("DELETE", f"/v1/{database}/dumps/{dump}")

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        failures = []
        for turn in range(len(self._relays)):
            number = (self._first + turn) % len(self._relays)
            try:
                answer = await self._request_one(self._relays[number], method, path, body)
            except ServerUnavailable as error:
                failures.append(error.message)
                continue
            self._first = number
            return answer
        raise ServerUnavailable("; ".join(failures) or "no relay is configured")

    async def _request_one(
        self, relay: str, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        async with await self._http.request(
            method, relay, path, json=body, otherwise=ServerUnavailable
        ) as answer:
            return await answer.json_object()
