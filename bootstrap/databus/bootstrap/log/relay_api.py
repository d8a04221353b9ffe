"""The relay's JSON endpoints that the log writer needs: ranges, sources, dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from databus.common.checkpoint import Position, decode_position
from databus.common.errors import BadCheckpoint, DatabusError, ServerUnavailable, from_answer
from databus.common.http.peer_answers import PLAIN, read_bounded, read_json
from databus.common.private import HiddenUrl

BOOTSTRAP = "bootstrap"
_TIMEOUT = aiohttp.ClientTimeout(total=15.0, sock_connect=5.0)


class RelayApi:
    """Asks the relays in turn; the one that answered last is asked first.

    Dumps are known only to the relay that was asked to make them, so as long as it answers
    nobody else is asked.

    Owner: one event loop; ``async with`` opens and closes its connections.
    Raises: ServerUnavailable if none answers; the error that a relay answered with.
    """

    def __init__(self, relays: Sequence[str]) -> None:
        self._relays = [HiddenUrl(relay.rstrip("/")) for relay in relays]
        self._first = 0
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def databases(self) -> list[str]:
        """The names of the databases that the relay serves."""
        document = await self._ask("GET", "/v1/databases")
        try:
            return [str(item["name"]) for item in document["databases"]]
        except (KeyError, TypeError) as error:
            raise self._odd("/v1/databases", error) from error

    async def sources(self, database: str) -> Mapping[str, Any]:
        """The sources with the range and clock of the stream."""
        path = f"/v1/{database}/sources"
        document = await self._ask("GET", path)
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

    async def report(self, database: str, patterns: Sequence[str]) -> Mapping[str, Any]:
        """Report that suspended tables are repaired from here, and learn which there are."""
        body = {"action": "present", "by": BOOTSTRAP, "sources": list(patterns)}
        return await self._ask("POST", f"/v1/{database}/tables", body)

    async def start_dump(
        self, database: str, sources: Sequence[str], reader: Position
    ) -> Mapping[str, Any]:
        """Ask for a dump of whole tables, which waits for one who has read up to ``reader``."""
        body = {"sources": list(sources), "reader": reader.to_json()}
        return await self._ask("POST", f"/v1/{database}/dumps", body)

    async def dump(
        self, database: str, dump: str, reader: Position, *, resume: bool = False
    ) -> Mapping[str, Any]:
        """Tell a dump up to where it was read, and learn how it is getting on."""
        body = {"reader": reader.to_json(), **({"state": "running"} if resume else {})}
        return await self._ask("PATCH", f"/v1/{database}/dumps/{dump}", body)

    async def cancel_dump(self, database: str, dump: str) -> None:
        """Have no more of a dump."""
        await self._ask("DELETE", f"/v1/{database}/dumps/{dump}")

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        failures = []
        for turn in range(len(self._relays)):
            number = (self._first + turn) % len(self._relays)
            try:
                answer = await self._ask_one(self._relays[number], method, path, body)
            except ServerUnavailable as error:
                failures.append(error.message)
                continue
            self._first = number
            return answer
        raise ServerUnavailable("; ".join(failures) or "no relay is configured")

    async def _ask_one(
        self, relay: str, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        if self._session is None:
            raise ServerUnavailable("the connections to the relays are closed")
        try:
            async with self._session.request(
                method, relay + path, json=body, headers=PLAIN, allow_redirects=False
            ) as response:
                text = await read_bounded(relay + path, response.headers, response.content)
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise ServerUnavailable(f"{relay} does not answer: {reason}") from error
        if status >= 300:
            raise from_answer(relay + path, status, text, otherwise=ServerUnavailable)
        document = read_json(text, f"the answer of {relay}{path}", ServerUnavailable)
        if not isinstance(document, dict):
            raise ServerUnavailable(f"{relay}{path} answered {status} without a JSON object")
        return document
