"""Refuses changes that a foreign web page requests through a browser that can reach the server.

A page can make a browser send a request to any address.  Until there is authentication, a request
that changes something must meet three conditions.  It has ``Content-Type: application/json``,
which a page cannot send to another origin without a CORS preflight.  It does not have the
``Origin`` of another site.  It names this server in ``Host``: DNS rebinding, a foreign name that
resolves to our address, would otherwise make a foreign page one of ours.
"""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from aiohttp import web

from databus.common.errors import ForeignHost, ForeignOrigin, UnsupportedMediaType
from databus.common.http.listening_socket import host_of

HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})


class RequestGuard:
    """Decides which requests may change something.

    Invariants:
        I1. A request of another method than HARMLESS passes only with a Host that is known, an
            Origin (if any) that is the Host's or allowed, and a body (if any) that is JSON.

    Owner: anyone; it does not change.
    Raises: ForeignHost, ForeignOrigin, UnsupportedMediaType.
    """

    def __init__(self, listen: str, allowed_hosts: Sequence[str] = ()) -> None:
        self._names = {"localhost", host_of(listen).lower(), *_short_names()}
        self._allowed = tuple(pattern.lower() for pattern in allowed_hosts)

    async def check(self, request: web.BaseRequest) -> None:
        """Raise if the request would change something and may not."""
        if request.method in HARMLESS:
            return
        host = request.headers.get("Host", "")
        if not await self._is_known(_name_of(host)):
            raise ForeignHost(
                f"the request's Host is {host!r}, which is not a name of this server; add it to "
                f"allowed_hosts if it is one",
                host=host,
            )
        self._check_origin(request.headers.getall("Origin", []), host)
        if request.can_read_body:
            _check_type(request)

    async def _is_known(self, name: str) -> bool:
        if not name:
            return False
        if name in self._names or self._is_allowed(name) or _is_address(name):
            return True
        return name == await asyncio.to_thread(_full_name)

    def _is_allowed(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._allowed)

    def _check_origin(self, origins: Sequence[str], host: str) -> None:
        for origin in origins:
            try:
                authority = urlsplit(origin).netloc.lower()
            except ValueError:
                authority = ""
            if not authority or not (
                authority == host.lower() or self._is_allowed(_name_of(authority))
            ):
                raise ForeignOrigin(
                    f"a page of {origin!r} requests a change at {host!r}; only this server's own "
                    f"pages may do that",
                    origin=origin,
                )


def _check_type(request: web.BaseRequest) -> None:
    if len(request.headers.getall("Content-Type", [])) == 1:
        kind, _, parameters = request.headers["Content-Type"].partition(";")
        charset = parameters.strip().lower().removeprefix("charset=").strip('"')
        if kind.strip().lower() == "application/json" and charset in ("", "utf-8", "us-ascii"):
            return
    raise UnsupportedMediaType(
        f"the body's Content-Type is {request.headers.get('Content-Type')!r}; send JSON in UTF-8 "
        f"with Content-Type: application/json"
    )


def _name_of(authority: str) -> str:
    """The name in HOST or HOST:PORT, without an IPv6 address's brackets."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.rpartition(":")[0].lower() if ":" in authority else authority.lower()


def _is_address(name: str) -> bool:
    """Whether it is an IP address, which needs no name server and so allows no DNS rebinding."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@functools.cache
def _short_names() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0]})


@functools.cache
def _full_name() -> str:
    """May query a name server, so it runs once, and only for a name that is not known yet."""
    return socket.getfqdn().lower()
