"""The client's settings: one frozen object, with units in the names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from databus.common.errors import ConfigError
from databus.common.schema import SourceSchema

Dispatch = Literal["serial", "within_window", "across_windows"]
OnGap = Literal["error", "oldest", "latest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that may be tuned; the defaults suit a consumer of one database.

    A checkpoint is taken at the end of a window when at least ``checkpoint_every_windows``
    windows and ``checkpoint_every_s`` seconds have passed since the last one, and when the
    stream falls idle.  Empty progress (everything was filtered out) moves it at most every
    ``idle_checkpoint_s``.

    ``callback_budget_s`` bounds one callback; None sets no bound.  A callback that fails is
    retried ``max_retries`` times from the last checkpoint, after ``retry_s``, twice that, and
    so on up to ``retry_most_s``.

    ``on_gap`` says what happens when neither the relays nor a bootstrap server reach back to
    our position: stop with an error, or go on at the oldest or latest event and lose some.

    ``client_name`` is how the servers call us in their metrics; it changes nothing else.

    ``objects``: JSON documents and PostgreSQL's arrays come as Python objects in ``event.value``;
    False gives their exact text.

    ``max_pull_failures`` of None tries the servers for ever.
    """

    dispatch: Dispatch = "serial"
    workers: int = 4
    on_gap: OnGap = "error"
    checkpoint_every_windows: int = 1
    checkpoint_every_s: float = 0.0
    idle_checkpoint_s: float = 5.0
    callback_budget_s: float | None = 300.0
    max_retries: int = 10
    retry_s: float = 0.1
    retry_most_s: float = 30.0
    buffer_bytes: int = 16 << 20
    max_bytes: int | None = None
    follow: bool = True
    wait_ms: int = 10_000
    connect_timeout_s: float = 5.0
    answer_timeout_s: float = 60.0
    silence_timeout_s: float = 20.0
    reconnect_s: float = 0.1
    reconnect_most_s: float = 10.0
    max_pull_failures: int | None = None
    reader_schemas: Mapping[str, SourceSchema] = field(default_factory=dict)
    client_name: str = ""
    objects: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.dispatch not in ("serial", "within_window", "across_windows"):
            raise ConfigError(
                f"dispatch is {self.dispatch!r}, not serial, within_window or across_windows"
            )
        if self.on_gap not in ("error", "oldest", "latest"):
            raise ConfigError(f"on_gap is {self.on_gap!r}, not error, oldest or latest")
        least = {"workers": 1, "checkpoint_every_windows": 1, "buffer_bytes": 1, "max_retries": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}, which is below {low}")


def parse_options(values: Mapping[str, Any]) -> Options:
    """The options by name.

    Raises:
        ConfigError: a name is unknown (the message gives the nearest) or a value is wrong.
    """
    known = [item.name for item in fields(Options)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"unknown option {name}; {advice}")
    return Options(**values)
