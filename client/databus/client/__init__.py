"""The client library: read the committed changes of a database, from wherever they are held."""

from __future__ import annotations

from databus.client.client import DatabusClient
from databus.client.raw import RawWindows

__all__ = ["DatabusClient", "RawWindows"]
