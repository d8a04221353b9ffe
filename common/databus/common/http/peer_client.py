"""The HTTP client of all rooms: requests to Databus servers, with errors of the tree only.

Every answer is bounded in bytes and in time, none is unpacked, and no redirect is followed:
an answer must not send us to another server.  Programs that cannot run an event loop use
``peer_calls``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

import aiohttp

from databus.common.access.credentials import Credentials
from databus.common.errors import (
    BadRequest,
    DatabusError,
    ServerUnavailable,
    TooManyRequests,
    from_answer,
)
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
_ROUNDS = 3


class PeerAnswer:
    """An answer whose head has arrived; the end of ``async with`` releases its connection.

    Owner: the task that sent the request.
    Raises: ServerUnavailable if the connection breaks, or the server sends nothing for too long.
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
        """Release the connection; it is reused if the body was read to its end."""
        connection = self._response.connection
        transport = None if connection is None else connection.transport
        if transport is not None and transport.get_extra_info("sslcontext") is not None:
            # An orderly end of TLS would wait for a server whose answer has not ended.
            transport.abort()
        self._response.close()

    async def read(self) -> bytes:
        """The bytes that have arrived, waiting for some; b"" at the orderly end."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise broke_off(self.server, error) from error

    def read_nowait(self) -> bytes:
        """The bytes that have arrived; b"" if there are none, or only the end."""
        try:
            return self._response.content.read_nowait()
        except (aiohttp.ClientError, OSError) as error:
            raise broke_off(self.server, error) from error

    async def body(self, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
        """The whole body, of ``limit_bytes`` at most."""
        try:
            return await read_bounded(self.url, self.headers, self._response.content, limit_bytes)
        except (aiohttp.ClientError, OSError) as error:
            raise broke_off(self.server, error) from error

    async def json(self, error: type[DatabusError] = ServerUnavailable) -> Any:
        """The body as JSON.  Anything else raises ``error``."""
        return read_json(await self.body(), f"the answer of {self.url}", error)

    async def json_object(self, error: type[DatabusError] = ServerUnavailable) -> dict[str, Any]:
        """The body, a JSON object.  Anything else raises ``error``."""
        document = await self.json(error)
        if not isinstance(document, dict):
            raise error(f"{self.url} answered {str(document)[:100]}, which is not an object")
        return document

    async def problem(self, otherwise: type[DatabusError] | None) -> DatabusError:
        """The error in the answer: of the class of its code, or else of ``otherwise``."""
        require_plain(self.url, self.headers)
        body = b""
        try:
            while part := await self._response.content.read(PROBLEM_BYTES - len(body)):
                body += part
        except (aiohttp.ClientError, OSError) as error:
            return broken_problem(self.url, self.status, error)
        problem = from_answer(self.url, self.status, body, otherwise=otherwise)
        pause = self.headers.get("Retry-After", "")
        if isinstance(problem, TooManyRequests) and pause.isascii() and pause.isdigit():
            problem.details.setdefault("retry_after_s", int(pause[:9]))
        return problem


class PeerClient:
    """One pool of connections to Databus servers.

    ``connect_s`` bounds a connection's start, ``answer_s`` a whole answer.  ``socket_path`` is a
    unix socket that every request uses, whatever its host is; credentials are not sent there.
    What ``credentials`` does not have comes from the environment, unless the server ``is_foreign``:
    not ours.

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
        credentials: Credentials | None = None,
        is_foreign: bool = False,
    ) -> None:
        self._connect_s = connect_s
        self._answer_s = answer_s
        self._read_bytes = read_bytes
        # The server sends frames from the ring without a copy; encoding would cost it one.
        self._headers = {**PLAIN, **(headers or {})}
        self._socket_path = socket_path
        self._credentials = Credentials()
        if socket_path is None:
            given = credentials or Credentials()
            self._credentials = given if is_foreign else given.or_environment()
        self._is_open = self._has_tls = False
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
        if self._has_tls:
            # A TLS connection that was aborted closes its socket in the loop's next rounds.
            for _ in range(_ROUNDS):
                await asyncio.sleep(0)

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

        With ``silence_s`` the answer has no time limit, but no pause in it may be longer.
        A status other than success is raised: as the error that the code of its problem names, or
        as one of the class ``otherwise``.  With ``is_any_status_fine`` only redirects are raised.

        Raises:
            ServerUnavailable: the server does not answer, breaks off, or encodes the answer.
            BadRequest: the URL is not valid.
            ConfigError: a file of the credentials cannot be used, or the token would be sent
                unencrypted.
        """
        whole = server + path
        bearer, context = self._credentials.headers(whole), self._credentials.context(whole)
        self._has_tls |= context is not None
        url = f"{server}{path}"  # for errors: formatting a HiddenUrl hides its password
        try:
            response = await self._connections().request(
                method,
                whole,
                params=query,
                json=json,
                data=data,
                headers={**(headers or {}), **bearer},
                ssl=context or True,
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
            raise BadRequest(f"{url} is not a valid URL: {error}") from error
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
