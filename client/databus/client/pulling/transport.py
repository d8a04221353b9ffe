"""The wire: HTTP requests to relays and bootstrap servers, and nothing about what to ask.

Every failure comes out as an error of the tree: a problem document as the class that its code
names, a lost connection or a silence as ``ServerUnavailable``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from databus.common.checkpoint import Position
from databus.common.errors import (
    BadRequest,
    DatabusError,
    FormatError,
    ServerUnavailable,
    from_answer,
)
from databus.common.http.peer_answers import PLAIN, read_bounded, read_json, require_plain
from databus.common.http.request_parameters import CLIENT_HEADER
from databus.common.schema.source_schema import SourceSchema
from databus.common.table_state import TableState, table_state_of

FRAMES_TYPE = "application/vnd.databus.frames;spans=1"
_PROBLEM_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Registration:
    """What a server said about a database: its clock and its schemas in order of version."""

    clock: str
    schemas: tuple[SourceSchema, ...]
    tables: tuple[TableState, ...] | None = None
    """Those that are not followed; None where the server does not say."""


class ResponseBody:
    """The body of a stream answer, as it arrives.

    ``clock`` is the stream's identity; ``prev`` and ``newest`` bound what the server held
    when it answered, ``start`` is the place of the commit time that was asked for; None where it
    does not say.  ``is_ahead``: it had not come as far as the
    start that was asked for, and waits for it.

    Owner: the task that opened it.
    """

    def __init__(self, server: str, response: aiohttp.ClientResponse) -> None:
        self._server = server
        self._response = response
        self.clock = response.headers.get("Databus-Clock")
        self.prev = _position(response.headers.get("Databus-Prev"))
        self.newest = _position(response.headers.get("Databus-Max"))
        self.start = _position(response.headers.get("Databus-Start"))
        self.is_ahead = response.headers.get("Databus-Ahead") == "true"

    async def read(self) -> bytes:
        """The bytes that have arrived, waiting for some; b"" at the orderly end.

        Raises:
            ServerUnavailable: the connection broke, or the server fell silent.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnavailable(
                f"{self._server} broke off in the middle of an answer: {_reason(error)}"
            ) from error


class Transport:
    """One pool of connections to all servers.

    Invariants:
        I1. No connection is left open after ``close``.

    Owner: one event loop.
    Raises: the errors of the tree, only.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float = 5.0,
        answer_timeout_s: float = 60.0,
        silence_timeout_s: float = 20.0,
        read_bytes: int = 1 << 18,
        client_name: str = "",
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._read_bytes = read_bytes
        self._headers = {CLIENT_HEADER: client_name} if client_name else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=8),
            read_bufsize=self._read_bytes,
            auto_decompress=False,
            headers=self._headers,
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def register(self, server: str, database: str, sources: tuple[str, ...]) -> Registration:
        """The clock and all schema versions of ``sources`` (globs; none are all)."""
        query = {"sources": ",".join(sources)} if sources else {}
        document = await self.get_json(server, f"/v1/{database}/register", query)
        try:
            schemas = tuple(SourceSchema.from_json(item["schema"]) for item in document["schemas"])
            tables = document.get("tables")
            states = None if tables is None else tuple(map(table_state_of, tables))
            return Registration(str(document["clock"]), schemas, states)
        except (KeyError, TypeError) as error:
            raise FormatError(
                f"{server} gave a registration without {error} for database {database}"
            ) from error

    async def get_json(self, server: str, path: str, query: Mapping[str, str]) -> Any:
        """The JSON document at ``path``."""
        timeout = aiohttp.ClientTimeout(
            total=self._answer_timeout_s, sock_connect=self._connect_timeout_s
        )
        async with self._get(server, path, query, "application/json", timeout) as response:
            body = await read_bounded(f"{server}{path}", response.headers, response.content)
            return read_json(body, f"the answer of {server}{path}", FormatError)

    @asynccontextmanager
    async def stream(
        self, server: str, path: str, query: Mapping[str, str]
    ) -> AsyncIterator[ResponseBody]:
        """The answer of a stream endpoint, in frames."""
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self._connect_timeout_s,
            sock_read=self._silence_timeout_s,
        )
        async with self._get(server, path, query, FRAMES_TYPE, timeout) as response:
            try:
                yield ResponseBody(server, response)
            finally:
                # A stream that is left before its end cannot be reused.
                response.close()

    @asynccontextmanager
    async def _get(
        self,
        server: str,
        path: str,
        query: Mapping[str, str],
        accept: str,
        timeout: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise ServerUnavailable("the transport is closed; open it with 'async with'")
        url = server.rstrip("/") + path
        try:
            response = await self._session.get(
                url,
                params=dict(query),
                # Frames go from the ring to the socket as they lie; coding them costs the relay.
                headers={"Accept": accept, **PLAIN},
                timeout=timeout,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnavailable(f"{server} does not answer: {_reason(error)}") from error
        except ValueError as error:
            raise BadRequest(f"{url} is not a URL to ask: {error}") from error
        async with response:
            if response.status != 200:
                raise await _failure(server, path, response)
            require_plain(url, response.headers)
            try:
                yield response
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise ServerUnavailable(
                    f"{server} broke off in the middle of an answer: {_reason(error)}"
                ) from error


async def _failure(server: str, path: str, response: aiohttp.ClientResponse) -> DatabusError:
    try:
        text = await response.content.read(_PROBLEM_BYTES)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return ServerUnavailable(f"{server} broke off: {_reason(error)}")
    return from_answer(f"{server}{path}", response.status, text)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _position(text: str | None) -> Position | None:
    if text is None:
        return None
    scn, _, seq = text.partition(":")
    try:
        return Position(int(scn), int(seq)) if seq not in ("", "end") else Position(int(scn))
    except ValueError as error:
        raise FormatError(f"the header says {text!r}, which is not scn:seq") from error
