"""The wire: HTTP requests to relays and bootstrap servers.

What is not here: which server to read, and from where.  Every failure is an error of the tree: a
problem document is the class of its code, a lost or silent connection is ``ServerUnavailable``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from databus.common.access.credentials import Credentials
from databus.common.checkpoint import Position
from databus.common.errors import FormatError
from databus.common.http.request_parameters import CLIENT_HEADER
from databus.common.schema.source_schema import SourceSchema
from databus.common.table_state import TableState, table_state_of

if TYPE_CHECKING:
    from databus.common.http.peer_client import PeerAnswer

FRAMES_TYPE = "application/vnd.databus.frames;spans=1"
_BULK_BYTES = 1 << 16
"""So much at once shows that the server sends faster than we read."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A server's registration answer: the clock, and the schemas in order of version."""

    clock: str
    schemas: tuple[SourceSchema, ...]
    tables: tuple[TableState, ...] | None = None
    """Those that are not followed; None if the server does not report them."""


class ResponseBody:
    """The body of a stream answer, as it arrives.

    ``clock`` is the stream's identity; ``prev`` and ``newest`` bound what the server held
    when it answered.  ``start`` is the position of the requested commit time.  Each is None
    if the server does not give it.  ``is_ahead``: the requested start is ahead of the server's
    stream, and the server waits for it.  ``epoch`` is the fencing number of a cluster's leader, 0
    without a cluster.

    Owner: the task that opened it.
    """

    def __init__(self, answer: PeerAnswer, read_bytes: int) -> None:
        self.clock = answer.headers.get("Databus-Clock")
        self.prev = _position(answer.headers.get("Databus-Prev"))
        self.newest = _position(answer.headers.get("Databus-Max"))
        self.start = _position(answer.headers.get("Databus-Start"))
        epoch = answer.headers.get("Databus-Epoch", "")
        self.epoch = int(epoch) if epoch.isdecimal() else 0
        self.is_ahead = answer.headers.get("Databus-Ahead") == "true"
        self._answer = answer
        self._read_bytes = read_bytes

    async def read(self) -> bytes:
        """The bytes that have arrived, waiting for some; b"" at the orderly end."""
        return await self._answer.read()

    async def read_bulk(self) -> list[bytes]:
        """As ``read``, in pieces; b"" at the end.

        While the server sends faster than they are read, it collects ``read_bytes``: a step of the
        loop receives less, and each block that is passed on costs the same, whatever its size.
        """
        parts = [await self._answer.read()]
        size = len(parts[0])
        while _BULK_BYTES <= size < self._read_bytes:
            await asyncio.sleep(0)
            more = self._answer.read_nowait()
            if not more:
                break
            parts.append(more)
            size += len(more)
        return parts


class Transport:
    """One pool of connections to all servers.

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
        credentials: Credentials | None = None,
    ) -> None:
        # With aiohttp: a program that connects to no server needs neither.
        from databus.common.http.peer_client import PeerClient

        self._silence_timeout_s = silence_timeout_s
        self._read_bytes = read_bytes
        self._http = PeerClient(
            connect_s=connect_timeout_s,
            answer_s=answer_timeout_s,
            read_bytes=read_bytes,
            headers={CLIENT_HEADER: client_name} if client_name else {},
            credentials=credentials,
        )

    async def __aenter__(self) -> Self:
        self._http.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._http.close()

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
        async with await self._http.request(
            "GET", server.rstrip("/"), path, query=query, headers={"Accept": "application/json"}
        ) as answer:
            return await answer.json(FormatError)

    @asynccontextmanager
    async def stream(
        self, server: str, path: str, query: Mapping[str, str]
    ) -> AsyncIterator[ResponseBody]:
        """The answer of a stream endpoint, in frames."""
        async with await self._http.request(
            "GET",
            server.rstrip("/"),
            path,
            query=query,
            headers={"Accept": FRAMES_TYPE},
            silence_s=self._silence_timeout_s,
        ) as answer:
            yield ResponseBody(answer, self._read_bytes)


def _position(text: str | None) -> Position | None:
    if text is None:
        return None
    scn, _, seq = text.partition(":")
    try:
        return Position(int(scn), int(seq)) if seq not in ("", "end") else Position(int(scn))
    except ValueError as error:
        raise FormatError(f"the header has {text!r}, which is not scn:seq") from error
