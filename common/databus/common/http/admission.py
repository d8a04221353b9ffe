"""Who may send which request: the one place where the endpoints' needs meet the callers' grants.

Every route of a table of endpoints goes through ``Admission.answer``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from databus.common.access.authority import (
    Authority,
    Presented,
    Principal,
    bearer_of,
    presented,
)
from databus.common.access.credentials import Credentials
from databus.common.access.grants import EVERYTHING, Access, Scope, access_of
from databus.common.access.identity_keys import IdentityKeys
from databus.common.access.identity_tokens import is_identity_token
from databus.common.access.request_limits import BytePace, RequestLimits
from databus.common.errors import Forbidden
from databus.common.http.http_application import STOPPING, Handler, body_of
from databus.common.http.openapi_document import Endpoint
from databus.common.http.peer_answers import read_json
from databus.common.http.peer_client import PeerClient

if TYPE_CHECKING:
    from databus.common.access_config import AuthConfig, OidcConfig

ADMISSION: web.AppKey[Admission] = web.AppKey("databus_admission")

_KEYS_S = 10.0
_NOTHING = Presented()

_log = logging.getLogger("databus.http")


def granted(request: web.Request) -> Access:
    """What this request may get; everything where there is no authentication."""
    admission = request.app.get(ADMISSION)
    return EVERYTHING if admission is None else admission.access_of(request)


def pace_of(request: web.Request) -> BytePace | None:
    """How fast the caller of an admitted request may be sent bytes; None without a limit."""
    admission = request.app.get(ADMISSION)
    return None if admission is None else admission.pace_of(request)


async def paced(request: web.Request, pace: BytePace | None, sent_bytes: int) -> None:
    """Wait after a part of an answer while its caller is above its limit, or until we stop."""
    pause_s = 0.0 if pace is None else pace.pause_s(sent_bytes)
    if pause_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(request.app[STOPPING].wait(), pause_s)


class _Admitted(NamedTuple):
    request: web.Request
    shown: Presented
    principal: Principal | None
    access: Access


class Admission:
    """Authenticates the requests of one server, checks their grants, and counts them.

    Invariants:
        I1. After ``configure``, no answer continues whose principal no longer has the same
            grants: its connection is closed.
        I2. No answer continues after the identity provider's token that it was sent for has ended.

    Owner: one event loop.
    """

    def __init__(self, config: AuthConfig) -> None:
        self._limits = RequestLimits()
        self._open: dict[int, _Admitted] = {}
        self._authority: Authority | None = None
        self._identities: IdentityKeys | None = None
        self.configure(config)

    def configure(self, config: AuthConfig) -> None:
        """Use another configuration from now on."""
        self._authority = Authority(config) if config.is_on else None
        self._identities = (
            IdentityKeys(config.oidc, key_set_of) if config.oidc is not None else None
        )
        closed = 0
        for one in list(self._open.values()):
            if self._authority is None or one.request.transport is None:
                continue
            if one.principal is None or self._authority.find(one.shown) != one.principal:
                one.request.transport.close()
                closed += 1
        if closed:
            _log.info("%d connections were closed: their grants have changed", closed)

    def access_of(self, request: web.Request) -> Access:
        """What an admitted request may get."""
        return self._open[id(request)].access

    def pace_of(self, request: web.Request) -> BytePace | None:
        """See the function of this name."""
        principal = self._open[id(request)].principal
        return None if principal is None else self._limits.pace_of(principal)

    async def answer(
        self, request: web.Request, endpoint: Endpoint, handler: Handler
    ) -> web.StreamResponse:
        """What the handler answers, if the request may be sent.

        Raises:
            Unauthenticated, Forbidden, TooManyRequests.
        """
        need = endpoint.needs
        if need.scope is Scope.OPEN:
            return await handler(request)
        if self._authority is None:
            with self._recorded(_Admitted(request, _NOTHING, None, EVERYTHING)):
                return await handler(request)
        shown = await self._shown(request)
        principal = self._authority.require(shown)
        with self._limits.counted(principal, is_stream=endpoint.is_stream):
            database = request.match_info.get("db")
            access = access_of(principal.grants, need, database, principal.name)
            with (
                self._recorded(_Admitted(request, shown, principal, access)),
                _closed_at_its_end(request, shown),
            ):
                await _check(request, endpoint, access)
                return await handler(request)

    async def _shown(self, request: web.Request) -> Presented:
        authorization = request.headers.getall("Authorization", [])
        if self._identities is not None and authorization:
            token = bearer_of(authorization)
            if is_identity_token(token):
                return Presented(identity=await self._identities.identity(token))
        return presented(authorization, request.get_extra_info("peercert"))

    @contextlib.contextmanager
    def _recorded(self, admitted: _Admitted) -> Iterator[None]:
        number = id(admitted.request)
        self._open[number] = admitted
        try:
            yield
        finally:
            del self._open[number]


async def key_set_of(config: OidcConfig) -> Any:
    """The key set of an identity provider.

    Raises:
        DatabusError: there is no answer, or it is no JSON.
    """
    # Our own token is for our own servers.
    credentials = Credentials(ca=config.ca)
    async with (
        PeerClient(answer_s=_KEYS_S, credentials=credentials, is_foreign=True) as client,
        await client.request("GET", config.jwks, "") as answer,
    ):
        return await answer.json()


@contextlib.contextmanager
def _closed_at_its_end(request: web.Request, shown: Presented) -> Iterator[None]:
    """Close the connection when the provider's token ends, if the answer still runs then."""
    if shown.identity is None:
        yield
        return

    def close() -> None:
        if request.transport is not None:
            request.transport.close()

    left_s = shown.identity.until_s - time.time()
    timer = asyncio.get_running_loop().call_later(max(0.0, left_s), close)
    try:
        yield
    finally:
        timer.cancel()


async def _check(request: web.Request, endpoint: Endpoint, access: Access) -> None:
    """Refuse what the request names and the principal has no grant for.

    A list of sources in the query is narrowed by the handler; one in a body is not.
    """
    if access.is_whole:
        return
    names = {parameter.name for parameter in endpoint.parameters}
    query = request.query
    for name in {"sources", "source"} & names & query.keys():
        access.check_sources(part.strip() for part in query[name].split(","))
    if access.columns is not None:
        if "where" in query:
            # Its result would show what is in the columns that are left out.
            raise Forbidden("where is not granted to a principal with some of the columns")
        access.check_columns(part.strip() for part in query.get("columns", "").split(",") if part)
    if endpoint.body is not None:
        document = read_json(await body_of(request), "the body")
        named = document.get("sources", ()) if isinstance(document, dict) else ()
        one = document.get("source") if isinstance(document, dict) else None
        patterns = [*(named if isinstance(named, list) else ()), *([one] if one else ())]
        access.check_sources(map(str, patterns), may_expand=False)
