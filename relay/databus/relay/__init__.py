"""The relay: captures databases into rings and serves them over HTTP.

What other programs start it with is named here and imported when it is first used, so that a
fetcher does not load the HTTP server, nor the supervisor either of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from databus.relay.relay import LocalRelay
    from databus.relay.ring import Ring
    from databus.relay.server import make_relay_app
    from databus.relay.sources.catalogue import create_source
    from databus.relay.supervisor import run_relay

__all__ = [
    "LocalRelay",
    "Ring",
    "create_source",
    "make_relay_app",
    "run_relay",
]

_HOMES = {
    "LocalRelay": "databus.relay.relay",
    "Ring": "databus.relay.ring",
    "create_source": "databus.relay.sources.catalogue",
    "make_relay_app": "databus.relay.server",
    "run_relay": "databus.relay.supervisor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
