"""The reference of the client library: one entry for each of its public names."""

from __future__ import annotations

import databus.client

_INTRODUCTION = """# Python client

All public names of `databus.client`. [In Python](../clients/python.md) shows how they are used.
The docstring of `Consumer` is the delivery guarantee.
"""


def page() -> str:
    """The page in Markdown; mkdocstrings fills the entries in."""
    return "\n".join([_INTRODUCTION, *(f"::: databus.client.{name}\n" for name in NAMES)])


NAMES = tuple(databus.client.__all__)
