"""``/v1/{db}/dumps*``: forwarded to the database's fetcher through its unix socket."""

from __future__ import annotations

from aiohttp import web

from databus.common.errors import ServerUnavailable, StoreError
from databus.common.http.http_application import body_of
from databus.common.http.peer_answers import MAX_BODY_BYTES
from databus.common.http.peer_client import PeerClient
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
            return await _forward(request, body, socket.path)
    except (ServerUnavailable, StoreError) as error:
        if isinstance(error.__cause__, TimeoutError):
            problem = (
                f"has not answered within {TIMEOUT_S:g} s; it may be reading a large chunk: try "
                f"again, or lower chunk_rows"
            )
        else:
            problem = f"does not answer ({error.message}); the relay restarts it"
        raise ServerUnavailable(
            f"the fetcher of {database.name} {problem}", database=database.name
        ) from error


async def _forward(request: web.Request, body: bytes, socket_path: str) -> web.Response:
    async with (
        PeerClient(answer_s=TIMEOUT_S, socket_path=socket_path) as http,
        await http.request(
            request.method,
            "http://fetcher",
            str(request.rel_url),
            data=body or None,
            headers={"Content-Type": request.headers.get("Content-Type", "application/json")},
            is_any_status_fine=True,
        ) as answer,
    ):
        return web.Response(
            status=answer.status,
            body=await answer.body(MAX_BODY_BYTES),
            headers={name: answer.headers[name] for name in _PASSED_ON if name in answer.headers},
        )
