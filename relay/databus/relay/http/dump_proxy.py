"""``/v1/{db}/dumps*``: handed on to the database's fetcher through its unix socket."""

from __future__ import annotations

import aiohttp
from aiohttp import web

from databus.common.errors import ServerUnavailable, StoreError
from databus.common.http.http_application import body_of
from databus.relay.ring.data_folder import SocketName
from databus.relay.serving.database_view import DatabaseView

TIMEOUT_S = 30.0
_PASSED_ON = ("Content-Type", "Allow", "Retry-After", "Location")


async def pass_on(request: web.Request, database: DatabaseView) -> web.Response:
    """The fetcher's answer to ``request``, whose path is the same there.

    Raises:
        ServerUnavailable: the fetcher does not answer.
    """
    body = await body_of(request)
    try:
        with SocketName(database.folder.socket) as socket:
            return await _ask(request, body, socket.path)
    except TimeoutError as error:
        raise ServerUnavailable(
            f"the fetcher of {database.name} has not answered within {TIMEOUT_S:g} s; it may be "
            f"reading a large chunk: ask again, or lower chunk_rows",
            database=database.name,
        ) from error
    except (aiohttp.ClientError, OSError, StoreError) as error:
        raise ServerUnavailable(
            f"the fetcher of {database.name} does not answer ({type(error).__name__}: {error}); "
            f"it is restarted by the relay",
            database=database.name,
        ) from error


async def _ask(request: web.Request, body: bytes, socket_path: str) -> web.Response:
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=socket_path),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        ) as session,
        session.request(
            request.method,
            f"http://fetcher{request.rel_url}",
            data=body or None,
            headers={"Content-Type": request.headers.get("Content-Type", "application/json")},
        ) as answer,
    ):
        return web.Response(
            status=answer.status,
            body=await answer.read(),
            headers={name: answer.headers[name] for name in _PASSED_ON if name in answer.headers},
        )
