"""The client's settings: one frozen object, with units in the names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

from databus.common.access.credentials import Credentials
from databus.common.errors import ConfigError
from databus.common.schema.source_schema import SourceSchema
from databus.common.spelling import spelling_advice

Dispatch = Literal["serial", "within_window", "across_windows"]
OnGap = Literal["error", "oldest", "latest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All settings of a client; the defaults suit a consumer of one database.

    They are keyword arguments of ``DatabusClient``.
    """

    dispatch: Dispatch = "serial"
    """``serial`` calls one callback at a time.  ``within_window`` gives the events of one window to
    several workers by key, ``across_windows`` those of several windows."""
    workers: int = 4
    """Number of workers of the parallel modes."""
    on_gap: OnGap = "error"
    """What the client does if neither a relay nor a bootstrap server has its position: stop with an
    error, or continue at the ``oldest`` or ``latest`` event and lose changes."""
    checkpoint_every_windows: int = 1
    """Least number of windows between two checkpoints.  The client also takes one when the stream
    is idle."""
    checkpoint_every_s: float = 0.0
    """Least time between two checkpoints, in seconds."""
    idle_checkpoint_s: float = 5.0
    """Least time between two checkpoints while the filters select nothing, in seconds."""
    batch_rows: int = 10_000
    """Most rows of the windows that are given to ``onDataBatch`` together; a larger window comes
    alone."""
    batch_ms: int = 0
    """Longest time that ``onDataBatch`` waits for so many rows, in milliseconds; with 0 it gets
    those that have arrived.  It waits up to 20 ms for the rest of a window of which a part has
    arrived."""
    callback_budget_s: float | None = 300.0
    """Longest time of one callback, in seconds; None for no limit."""
    max_retries: int = 10
    """Number of times that the client calls a failing callback again from the last checkpoint."""
    max_dead_letters: int = 1000
    """With ``dead_letters``: number of stored events at which the client stops."""
    retry_s: float = 0.1
    """Pause before the first retry, in seconds; each further one is twice as long."""
    retry_most_s: float = 30.0
    """Longest pause before a retry, in seconds."""
    buffer_bytes: int = 16 << 20
    """Largest size of the frames that are received and not yet delivered."""
    max_bytes: int | None = None
    """Largest size of one answer; None for no limit."""
    follow: bool = True
    """Keep the answer open and receive events as they are committed; False polls."""
    wait_ms: int = 10_000
    """Without ``follow``: time that a poll waits for the next event."""
    connect_timeout_s: float = 5.0
    """Longest time for a connection, in seconds."""
    answer_timeout_s: float = 60.0
    """Longest time of an answer in JSON (schemas, positions), in seconds."""
    silence_timeout_s: float = 20.0
    """Time without a byte of a stream after which the client connects again, in seconds."""
    discover: bool = False
    """Whether ``relays`` are some relays of a cluster.  The client asks one of them which relays
    serve the database, and prefers followers of its ``zone``."""
    zone: str = ""
    """With ``discover``: the zone of the client."""
    reconnect_s: float = 0.1
    """Pause before the first reconnection, in seconds; each further one is twice as long."""
    reconnect_most_s: float = 10.0
    """Longest pause before a reconnection, in seconds."""
    max_pull_failures: int | None = None
    """Number of failures in a row after which the client stops; None to retry without limit."""
    reader_schemas: Mapping[str, SourceSchema] = field(default_factory=dict)
    """Schemas, by source, into which rows are resolved; without one, the newest schema."""
    client_name: str = ""
    """Name of the client in the metrics of the servers.  It has no other effect."""
    token: str = field(default="", repr=False)
    """Token for the servers.  Without it and ``token_file``: ``DATABUS_TOKEN`` or
    ``DATABUS_TOKEN_FILE`` of the environment."""
    token_file: str = ""
    """File with the token; it is read again at each request."""
    ca: str = ""
    """PEM file of the authorities that sign the servers' certificates; without it ``DATABUS_CA`` of
    the environment, or those of the system."""
    certificate: str = ""
    """PEM file of the certificate to present, for mutual TLS; without it ``DATABUS_CERTIFICATE``
    and ``DATABUS_KEY`` of the environment."""
    key: str = ""
    """PEM file of the certificate's private key."""
    objects: bool = True
    """Give JSON documents and PostgreSQL's arrays as Python objects; False gives their text."""
    seed: int | None = None
    """Seed of the random choices (which server, how long a pause), for tests."""

    def __post_init__(self) -> None:
        if self.dispatch not in ("serial", "within_window", "across_windows"):
            raise ConfigError(
                f"dispatch is {self.dispatch!r}, not serial, within_window or across_windows"
            )
        if self.on_gap not in ("error", "oldest", "latest"):
            raise ConfigError(f"on_gap is {self.on_gap!r}, not error, oldest or latest")
        least = {"workers": 1, "checkpoint_every_windows": 1, "buffer_bytes": 1, "max_retries": 0,
                 "batch_rows": 1, "batch_ms": 0}  # fmt: skip
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}, which is below {low}")
        _ = self.credentials  # whose fields must belong together

    @property
    def credentials(self) -> Credentials:
        """What the client presents to the servers."""
        return Credentials(
            token=self.token,
            token_file=self.token_file,
            ca=self.ca,
            certificate=self.certificate,
            key=self.key,
        )


class OptionFields(TypedDict, total=False):
    """The fields of ``Options`` as keyword arguments, for editors and type checkers."""

    dispatch: Dispatch
    workers: int
    on_gap: OnGap
    checkpoint_every_windows: int
    checkpoint_every_s: float
    idle_checkpoint_s: float
    batch_rows: int
    batch_ms: int
    callback_budget_s: float | None
    max_retries: int
    max_dead_letters: int
    retry_s: float
    retry_most_s: float
    buffer_bytes: int
    max_bytes: int | None
    follow: bool
    wait_ms: int
    connect_timeout_s: float
    answer_timeout_s: float
    silence_timeout_s: float
    discover: bool
    zone: str
    reconnect_s: float
    reconnect_most_s: float
    max_pull_failures: int | None
    reader_schemas: Mapping[str, SourceSchema]
    client_name: str
    token: str
    token_file: str
    ca: str
    certificate: str
    key: str
    objects: bool
    seed: int | None


def parse_options(values: Mapping[str, Any]) -> Options:
    """The options by name.

    Raises:
        ConfigError: a name is unknown (the message gives the nearest) or a value is wrong.
    """
    known = [item.name for item in fields(Options)]
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown option {name}; {spelling_advice(name, known)}")
    return Options(**values)
