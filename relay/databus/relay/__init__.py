"""The relay: captures databases into rings and serves them over HTTP.

The names that start its processes are listed here and imported at first use, so that a fetcher
does not load the HTTP server, and the supervisor loads neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from databus.relay.capture.source_catalogue import create_source
    from databus.relay.http.relay_server import make_relay_app
    from databus.relay.local_relay import LocalRelay
    from databus.relay.processes.supervisor import run_relay
    from databus.relay.ring.ring import Ring

__all__ = [
    "LocalRelay",
    "Ring",
    "create_source",
    "make_relay_app",
    "run_relay",
]

_HOMES = {
    "LocalRelay": "databus.relay.local_relay",
    "Ring": "databus.relay.ring.ring",
    "create_source": "databus.relay.capture.source_catalogue",
    "make_relay_app": "databus.relay.http.relay_server",
    "run_relay": "databus.relay.processes.supervisor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
