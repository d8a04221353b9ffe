"""The text of a configuration file: a relay over one database, and a bootstrap server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def relay_text(
    url: str,
    *sources: str,
    name: str = "shop",
    port: int = 0,
    data_dir: Path | str = "relay",
    relay: Mapping[str, object] | None = None,
    **database: object,
) -> str:
    """``[relay]`` and a ``[[database]]``; without sources, all of its tables.

    Port 0 is one that the system chooses; ``relay`` holds further keys of the first section.
    """
    listen = {"listen": f"127.0.0.1:{port}", "data_dir": data_dir, **(relay or {})}
    captured = {"name": name, "url": url, **({"sources": sources} if sources else {}), **database}
    return section("[relay]", listen) + section("[[database]]", captured)


def generator_text(folder: Path, events_per_second: int) -> str:
    """A relay of one worker in ``folder / "data"``, over a generator of windows of ten events."""
    return relay_text(
        f"generator://?events_per_second={events_per_second}&events_per_window=10",
        name="gen",
        data_dir=folder / "data",
        relay={"workers": 1},
        ring_bytes="1MB",
        sync_every="50ms",
    )


def bootstrap_text(relay_url: str, port: int, **settings: object) -> str:
    """``[bootstrap]`` of a server that reads that relay."""
    listen = {"listen": f"127.0.0.1:{port}", "data_dir": "bootstrap", "relays": [relay_url]}
    return section("[bootstrap]", {**listen, **settings})


def section(header: str, settings: Mapping[str, object]) -> str:
    """A section of a TOML file."""
    lines = [f"{key} = {_value(value)}" for key, value in settings.items()]
    return "\n".join([header, *lines, ""])


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + "}"
    return json.dumps(value, default=str, ensure_ascii=False)
