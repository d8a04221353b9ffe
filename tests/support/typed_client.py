"""What a type checker must refuse in a program that uses the client; nothing runs it.

Each line with a ``type: ignore`` is a mistake that mypy must find: a mark that ignores nothing is
an error of ``make run-types``.
"""

from __future__ import annotations

from databus.client import DatabusClient


def wrong_settings() -> None:
    """A name that no setting has, and values of another type."""
    DatabusClient(database="shop", relays=[], evry_s=1)  # type: ignore[call-arg] # no such setting
    DatabusClient(database="shop", relays=[], workers="4")  # type: ignore[arg-type] # a text
    DatabusClient(database="shop", relays=[], start="now")  # type: ignore[arg-type] # no such word
    DatabusClient(database="shop", relays=[], dispatch="serial", workers=2, on_gap="oldest")


def wrong_loops(client: DatabusClient) -> None:
    """The calls of the other iterator."""
    for window in client.windows():
        window.acommit()  # type: ignore[attr-defined] # of awindows()
    for _ in client.awindows():  # type: ignore[attr-defined] # needs async for
        pass


async def wrong_asynchronous_loops(client: DatabusClient) -> None:
    """The calls of the other iterator, in a coroutine."""
    async for window in client.awindows():
        window.commit()  # type: ignore[attr-defined] # of windows()
        window.acommit()  # type: ignore[unused-coroutine] # not awaited
        for _ in window:  # type: ignore[attr-defined] # needs async for
            pass
    async for _ in client.windows():  # type: ignore[attr-defined] # needs for
        pass
