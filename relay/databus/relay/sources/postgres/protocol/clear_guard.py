"""Prevents asyncpg, which does not support require_auth, from sending the password in clear text.

asyncpg accepts an event loop as an argument.  The loop in this module returns transports that
refuse a PasswordMessage with the password in clear text.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any


class ClearGuardLoop:
    """The running loop, with its own transports for connections that are opened through it.

    Invariants:
        I1. No transport sends the password in clear text.  If the server asks for it,
            ``was_asked`` is set and the connection is aborted.

    Owner: one connection attempt.
    """

    def __init__(self, password: str) -> None:
        text = password.encode() + b"\0"
        self.was_asked = False
        self._refused = b"p" + struct.pack("!I", len(text) + 4) + text
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def create_connection(self, factory: Callable[[], Any], *where: Any, **how: Any) -> Any:
        """As in the loop."""
        _, shim = await self._loop.create_connection(lambda: _Shim(factory(), self), *where, **how)
        return shim.transport, shim.inner

    async def create_unix_connection(self, factory: Callable[[], Any], *where: Any) -> Any:
        """As in the loop."""
        _, shim = await self._loop.create_unix_connection(lambda: _Shim(factory(), self), *where)
        return shim.transport, shim.inner

    async def start_tls(self, transport: Any, *what: Any, **how: Any) -> Any:
        """As in the loop."""
        secured = await self._loop.start_tls(transport.inner, *what, **how)
        return None if secured is None else _Transport(secured, self)

    def may_write(self, data: Any) -> bool:
        """Whether a message may be sent."""
        if bytes(data[: len(self._refused)]) != self._refused:
            return True
        self.was_asked = True
        return False


class _Shim(asyncio.Protocol):
    def __init__(self, inner: Any, loop: ClearGuardLoop) -> None:
        self.inner = inner
        self._loop = loop
        self.transport: _Transport | None = None

    def __getattribute__(self, name: str) -> Any:
        if name in ("inner", "_loop", "transport", "connection_made", "__dict__", "__class__"):
            return super().__getattribute__(name)
        return getattr(self.inner, name)

    def connection_made(self, transport: Any) -> None:
        self.transport = _Transport(transport, self._loop)
        self.inner.connection_made(self.transport)


class _Transport:
    def __init__(self, inner: Any, loop: ClearGuardLoop) -> None:
        self.inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, data: Any) -> None:
        if self._loop.may_write(data):
            self.inner.write(data)
        else:
            self.inner.abort()

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))
