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
