"""The HTTP client of all rooms: requests to servers of ours, with errors of the tree only.

Every answer is bounded in bytes and in time, none is unpacked, and no redirect is followed:
an answer must not send us to another server.  Programs that cannot run an event loop use
``peer_calls``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import aiohttp

from databus.common.errors import BadRequest, DatabusError, ServerUnavailable, from_answer
from databus.common.http.peer_answers import (
    MAX_JSON_BYTES,
    PLAIN,
    PROBLEM_BYTES,
    broke_off,
    broken_problem,
    no_answer,
    read_bounded,
    read_json,
    require_plain,
)

MAX_CONNECTIONS = 8


class PeerAnswer:
    """An answer whose head has come; ``async with`` lets go of its connection.

    Owner: the task that asked.
    Raises: ServerUnavailable where the connection breaks, or the server falls silent.
    """

    def __init__(self, server: str, url: str, response: aiohttp.ClientResponse) -> None:
        self.server = server
        self.url = url
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection; it is used again if the body was read to its end."""
        self._response.close()

    async def read(self) -> bytes:
        """The bytes that have arrived, waiting for some; b"" at the orderly end."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise broke_off(self.server, error) from error

    async def body(self, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
        """The whole body, which may have ``limit_bytes``."""
        try:
            return await read_bounded(self.url, self.headers, self._response.content, limit_bytes)
        except (aiohttp.ClientError, OSError) as error:
            raise broke_off(self.server, error) from error

    async def json(self, error: type[DatabusError] = ServerUnavailable) -> Any:
        """The body as JSON.  One that is none is an error of the class ``error``."""
        return read_json(await self.body(), f"the answer of {self.url}", error)

    async def json_object(self, error: type[DatabusError] = ServerUnavailable) -> dict[str, Any]:
        """The body, a JSON object.  One that is none is an error of the class ``error``."""
        document = await self.json(error)
        if not isinstance(document, dict):
            raise error(f"{self.url} answered {str(document)[:100]}, which is no object")
        return document

    async def problem(self, otherwise: type[DatabusError] | None) -> DatabusError:
        """The error that the answer is: as its code says, or else of the class ``otherwise``."""
        require_plain(self.url, self.headers)
        body = b""
        try:
            while part := await self._response.content.read(PROBLEM_BYTES - len(body)):
                body += part
        except (aiohttp.ClientError, OSError) as error:
            return broken_problem(self.url, self.status, error)
        return from_answer(self.url, self.status, body, otherwise=otherwise)


class PeerClient:
    """One pool of connections to servers of ours.

    ``connect_s`` bounds a connection's start, ``answer_s`` a whole answer.  ``socket_path`` is a
    unix socket, and stands for the host of every server.

    Invariants:
        I1. No connection is left open after ``close``.

    Owner: one event loop.
    """

    def __init__(
        self,
        *,
        connect_s: float = 5.0,
        answer_s: float = 60.0,
        read_bytes: int = 1 << 18,
        headers: Mapping[str, str] | None = None,
        socket_path: str | None = None,
    ) -> None:
        self._connect_s = connect_s
        self._answer_s = answer_s
        self._read_bytes = read_bytes
        # Frames go from the ring to the socket as they lie; coding them costs the server.
        self._headers = {**PLAIN, **(headers or {})}
        self._socket_path = socket_path
        self._is_open = False
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def open(self) -> None:
        """Allow requests.  The first one opens connections."""
        self._is_open = True

    async def close(self) -> None:
        """Close every connection."""
        self._is_open = False
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self,
        method: str,
        server: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        json: Any = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        silence_s: float | None = None,
        otherwise: type[DatabusError] | None = None,
        is_any_status_fine: bool = False,
    ) -> PeerAnswer:
        """The answer of ``server`` for ``path``, to be closed.

        With ``silence_s`` the answer may take for ever, but no pause in it longer than that.
        A status that is no success is raised: the error that the code of its problem names, or one
        of the class ``otherwise``.  ``is_any_status_fine`` leaves out this, but for redirects.

        Raises:
            ServerUnavailable: the server does not answer, breaks off, or answers in a coding.
            BadRequest: there is no such URL.
        """
        url = f"{server}{path}"  # for errors: a URL that hides its password does so here
        try:
            response = await self._connections().request(
                method,
                server + path,
                params=query,
                json=json,
                data=data,
                headers=headers,
                timeout=aiohttp.ClientTimeout(
                    total=self._answer_s if silence_s is None else None,
                    sock_connect=self._connect_s,
                    sock_read=silence_s,
                ),
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            raise no_answer(server, error) from error
        except ValueError as error:
            raise BadRequest(f"{url} is not a URL to ask: {error}") from error
        answer = PeerAnswer(server, url, response)
        try:
            is_fine = 200 <= answer.status < 300
            if not is_fine and (300 <= answer.status < 400 or not is_any_status_fine):
                raise await answer.problem(otherwise)
            require_plain(url, answer.headers)
        except BaseException:
            answer.close()
            raise
        return answer

    def _connections(self) -> aiohttp.ClientSession:
        if not self._is_open:
            raise ServerUnavailable("the HTTP client is closed; open it with 'async with'")
        if self._session is None:
            connector: aiohttp.BaseConnector
            if self._socket_path is None:
                connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS)
            else:
                connector = aiohttp.UnixConnector(path=self._socket_path)
            self._session = aiohttp.ClientSession(
                connector=connector,
                read_bufsize=self._read_bytes,
                auto_decompress=False,
                headers=self._headers,
            )
        return self._session
