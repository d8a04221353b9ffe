"""The source ``relay+http://``: another relay's stream, passed on unchanged.

Frames keep their bytes, so positions, windows and the clock's identity are the same at every
relay of a chain, and a consumer may move between them.  Only headers are decoded here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import Field

from databus.common.access.credentials import Credentials
from databus.common.checkpoint import OnlineCheckpoint, Position, encode
from databus.common.config import DatabaseConfig
from databus.common.errors import (
    ClockMismatch,
    ConfigError,
    DatabusError,
    DumpFailed,
    ScnTooOld,
    ServerUnavailable,
    SourcePositionLost,
    SourceUnavailable,
    UnknownSchema,
    from_answer,
)
from databus.common.frame.frame_format import scan
from databus.common.frame.window_builder import require_chain
from databus.common.http.peer_client import PeerClient
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.chained.parent_relay import (
    Following,
    Parent,
    ParentRegistration,
    Received,
    parent_client,
)
from databus.relay.sources.contract import Batch, Chunk, ChunkRequest, Finding, TableSize
from databus.relay.sources.source_options import SourceOptions, read_options

DEFAULT_PORT = 8700
TICK_S = 0.5

T = TypeVar("T")


class RelayOptions(SourceOptions):
    """The options of a source that is another relay."""

    start: Literal["oldest", "latest"] = "oldest"
    """The position in the parent's ring at which a new ring begins."""
    silence_s: float = Field(default=20.0, gt=0, strict=True)
    """Time without a byte after which the relay leaves the parent."""
    block: bool = Field(default=False, strict=True)
    """Whether the ring of this relay waits for its reader."""
    release: bool = Field(default=False, strict=True)
    """Whether this relay reports to a parent in block mode what is on disk here."""
    follower: str = ""
    """The name under which a follower in a cluster reports to the leader; the cluster sets it."""
    least_epoch: int = Field(default=0, ge=0, strict=True)
    """The lowest epoch of a leader that is read; the cluster sets it."""
    token_file: str = ""
    """File with the token for the parent."""
    ca: str = ""
    """PEM file of the authorities that sign the parents' certificates."""
    certificate: str = ""
    """PEM file of the certificate that this relay presents."""
    key: str = ""
    """PEM file of that certificate's private key."""


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Which parents to read, and how."""

    urls: tuple[str, ...]
    database: str
    sources: tuple[str, ...]
    start: str
    silence_s: float
    release: bool
    follower: str
    least_epoch: int
    credentials: Credentials


def read_settings(config: DatabaseConfig) -> RelaySettings:
    """The settings in a ``[[database]]`` section.

    Raises:
        ConfigError: the URL names no parent or no database, or an option is wrong.
    """
    parts = urlsplit(config.url.reveal)
    database = parts.path.strip("/")
    hosts = [host.strip() for host in parts.netloc.split(",")]
    wrong = (
        "names no database" if not database or "/" in database
        else "has an empty host" if not all(hosts)
        else "has a user; a relay needs none" if "@" in parts.netloc
        else "has a query; write options instead" if parts.query
        else ""
    )  # fmt: skip
    if wrong:
        raise ConfigError(
            f"database {config.name}: the URL {config.url} {wrong}; "
            "it is relay+http://HOST:PORT[,HOST:PORT...]/DATABASE"
        )
    for key in ("exclude_sources", "skipped_operations", "keys", *config.column_patterns):
        if getattr(config, key):
            raise ConfigError(
                f"database {config.name}: {key} belongs to the relay that reads the database; "
                f"what comes from {config.url} is passed on as it is"
            )
    scheme = parts.scheme.removeprefix("relay+")
    options = read_options(config, RelayOptions)
    return RelaySettings(
        urls=tuple(f"{scheme}://{_with_port(host)}" for host in hosts),
        database=database,
        sources=() if "*" in config.sources else config.sources,
        start=options.start,
        silence_s=options.silence_s,
        release=options.release,
        follower=options.follower,
        least_epoch=options.least_epoch,
        credentials=Credentials(
            token_file=options.token_file,
            ca=options.ca,
            certificate=options.certificate,
            key=options.key,
        ),
    )


def _with_port(host: str) -> str:
    return host if host.rpartition(":")[2].isdigit() else f"{host}:{DEFAULT_PORT}"


class Refusal(NamedTuple):
    """Why a parent does not serve us."""

    url: str
    error: DatabusError


def refused_by_all(refusals: list[Refusal], what: str) -> DatabusError:
    """The error to raise after every parent has refused ``what``.

    If one of them may answer later, it can be retried; otherwise SourcePositionLost has
    priority over other errors.
    """
    reasons = "; ".join(f"{url}: {error.message} ({error.code})" for url, error in refusals)
    message = f"no parent serves {what}: {reasons}"
    if any(refusal.error.retry for refusal in refusals):
        return SourceUnavailable(message)
    if any(isinstance(refusal.error, ScnTooOld) for refusal in refusals):
        return SourcePositionLost(message)
    return type(refusals[0].error)(message)


class RelaySource:
    """Follows one parent at a time, and the next one when it fails.

    Invariants:
        I1. It yields the parent's frames, byte by byte, in order, without the frames of the
            connection itself (heartbeats, errors).
        I2. After a move to another parent, the stream continues right after the last yielded
            frame, even in the middle of a window.
        I3. A parent of another clock is never read.
        I4. The schema of a frame is known before the frame is yielded.
        I5. No parent is read whose epoch is below one that was seen: in a cluster, it has led.

    Owner: one fetcher's event loop.
    Raises: as ``Source``; the message names every parent and its error.
    """

    def __init__(self, config: DatabaseConfig) -> None:
        self._name = config.name
        self._settings = settings = read_settings(config)
        self._parents = [
            Parent(url, settings.database, silence_s=settings.silence_s) for url in settings.urls
        ]
        self._query = {"sources": ",".join(settings.sources)} if settings.sources else {}
        self._turn = 0
        self._move_count = 0
        self._http = parent_client(settings.credentials)
        self._clock = ""
        self._schemas: dict[int, SourceSchema] = {}
        self._held: tuple[Position, Following] | None = None
        self._resolved = 0
        self._released: tuple[str, Position] | None = None
        self._epoch = settings.least_epoch

    @property
    def clock(self) -> str:
        """The identity of the clock at the chain's head."""
        return self._clock

    @property
    def _parent(self) -> Parent:
        return self._parents[self._turn]

    def _leave(self) -> None:
        """Move to the next parent."""
        if len(self._parents) > 1:
            self._turn = (self._turn + 1) % len(self._parents)
            self._move_count += 1

    def _connections(self) -> PeerClient:
        self._http.open()
        return self._http

    async def _first_answer(self, request: Callable[[Parent], Awaitable[T]], what: str) -> T:
        """The first answer without an error, starting with the current parent."""
        refusals: list[Refusal] = []
        while len(refusals) < len(self._parents):
            try:
                return await request(self._parent)
            except DatabusError as error:
                refusals.append(Refusal(self._parent.url, error))
                self._leave()
        raise refused_by_all(refusals, what)

    # -- opening --

    async def preflight(self) -> list[Finding]:
        """Whether the parents answer, know the database, and have one clock."""
        findings = []
        clocks: dict[str, str] = {}
        for parent in self._parents:
            try:
                clocks[parent.url] = (await self._register(parent)).clock
            except DatabusError as error:
                others = len(self._parents) > 1 and error.retry
                findings.append(
                    Finding(f"parent {parent.url}", error.message, error.hint, fatal=not others)
                )
        if len(set(clocks.values())) > 1:
            listed = ", ".join(f"{url} has {clock!r}" for url, clock in clocks.items())
            findings.append(
                Finding("url", f"the parents' clocks differ: {listed}", "use parents of one stream")
            )
        return findings

    async def open(self) -> None:
        """Load the clock and the schemas of a parent that answers."""
        registration = await self._first_answer(self._register, f"{self._settings.database}")
        self._clock = registration.clock
        self._learn(registration)

    async def _register(self, parent: Parent) -> ParentRegistration:
        return await parent.register(self._connections(), self._query)

    def _learn(self, registration: ParentRegistration) -> tuple[SourceSchema, ...]:
        """Store the schemas; returns the new ones."""
        new = tuple(s for s in registration.schemas if s.fingerprint not in self._schemas)
        self._schemas.update((schema.fingerprint, schema) for schema in new)
        return new

    async def first_scn(self) -> int:
        """The scn of ``first_position``."""
        return (await self.first_position()).scn

    async def first_position(self) -> Position:
        """The parent's oldest position, or its latest.  The stream from there stays open, so that
        the parent cannot discard it before it is read."""
        start = self._settings.start
        self._drop_held()
        following = await self._first_answer(
            self._begin_at_start, f"{self._settings.database} from {start}"
        )
        position = following.prev if start == "oldest" else following.newest
        self._held = (position, following)
        return position

    async def _begin_at_start(self, parent: Parent) -> Following:
        return await self._follow(parent, {"start": self._settings.start})

    def _drop_held(self) -> None:
        if self._held is not None:
            self._held[1].close()
            self._held = None

    # -- streaming --

    def stream(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        """All windows with a larger scn."""
        return self.stream_from(Position(after_scn))

    async def stream_from(self, position: Position) -> AsyncGenerator[Batch, None]:
        """Everything after ``position``, from one parent after another.

        Raises:
            SourcePositionLost: no parent has ``position`` any more.
            SourceUnavailable: no parent answers now.
            ClockMismatch: no parent has the clock of ``open``.
        """
        refusals: list[Refusal] = []
        while len(refusals) < len(self._parents):
            parent = self._parent
            following: Following | None = None
            try:
                following = await self._follow_from(parent, position)
                while True:
                    received = await following.receive(TICK_S)
                    if not following.was_heard:
                        continue
                    if received.data and "sources" not in self._query:
                        require_chain(scan(received.data, verify=False), position)
                    batch = await self._batch(parent, received)
                    position = received.last or position
                    if received.data or received.passed:
                        refusals.clear()
                    yield batch
            except DatabusError as error:
                refusals.append(Refusal(parent.url, error))
                self._leave()
            finally:
                if following is not None:
                    following.close()
        raise refused_by_all(refusals, f"{self._settings.database} after {position}")

    async def _follow_from(self, parent: Parent, position: Position) -> Following:
        held, self._held = self._held, None
        if held is not None:
            if held[0] == position:
                return held[1]
            held[1].close()
        checkpoint = OnlineCheckpoint(self._settings.database, self._clock, position)
        return await self._follow(parent, {"checkpoint": encode(checkpoint)})

    async def _follow(self, parent: Parent, start: dict[str, str]) -> Following:
        following = await parent.follow(self._connections(), {**self._query, **start})
        if following.clock == self._clock and following.epoch >= self._epoch:
            self._epoch = following.epoch
            return following
        following.close()
        if following.clock == self._clock:
            raise ServerUnavailable(
                f"its ring has the epoch {following.epoch}, and the leader's is {self._epoch} or "
                "more: it leads no longer, or does not lead yet"
            )
        raise ClockMismatch(
            f"its stream has the clock {following.clock!r}, the other parent's was {self._clock!r}",
            expected=self._clock,
            got=following.clock,
        )

    async def _batch(self, parent: Parent, received: Received) -> Batch:
        """The frames with the schemas that they are the first to use."""
        schemas: tuple[SourceSchema, ...] = ()
        if not received.fingerprints <= self._schemas.keys():
            schemas = self._learn(await self._register(parent))
            unknown = received.fingerprints - self._schemas.keys()
            if unknown:
                raise UnknownSchema(
                    f"frames up to {received.last} use the schema {min(unknown):016x}, "
                    f"which it has not registered"
                )
        if received.passed is not None:
            # A dump window may still follow at the heartbeat's own scn, and the heartbeat may
            # be inside a window; only scns before it are finished.
            self._resolved = max(self._resolved, received.passed.scn - 1)
        return Batch(received.data, schemas, self._resolved)

    async def release(self, position: Position) -> None:
        """With the option ``release``, report to a parent in block mode what is on disk here.

        Only the followed parent gets the report, once; after a move the next one does.  A follower
        in a cluster reports each time: the leader forgets one that has gone.
        """
        report = (self._parent.url, position)
        follower = self._settings.follower
        if not self._settings.release or (report == self._released and not follower):
            return
        document = position.to_json() | ({"follower": follower} if follower else {})
        parent, body = self._parent, json.dumps(document).encode()
        status, answer = await parent.forward(self._connections(), "POST", "/release", body)
        if status >= 400:
            raise from_answer(parent.url, status, answer)
        self._released = report  # Only now: a refused report is repeated.

    async def ack(self, scn: int) -> None:
        """Nothing to do: a parent stores no state of its readers."""

    async def schemas(self) -> list[SourceSchema]:
        """All versions that the parent has registered, the oldest first."""
        return list(self._schemas.values())

    # -- dumps --

    async def forward(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """The followed parent's answer to a request."""
        return await self._parent.forward(self._connections(), method, path, body)

    async def largest_key(self, source: str) -> list[Any] | None:
        """Refused: dumps run where the database is read."""
        raise self._no_dumps(source)

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        """Refused: dumps run where the database is read."""
        raise self._no_dumps(request.source)

    async def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        """Refused: dumps run where the database is read."""
        raise self._no_dumps(request.source)

    async def table_size(self, source: str) -> TableSize:
        """Refused: dumps run where the database is read."""
        raise self._no_dumps(source)

    def _no_dumps(self, source: str) -> DumpFailed:
        return DumpFailed(
            f"{source} cannot be dumped through a chained relay; request it from {self._parent.url}"
            f"/v1/{self._settings.database}/dumps"
        )

    # -- status --

    async def committed_scn(self) -> None:
        """The parent's report is in ``status``."""

    async def status(self) -> dict[str, Any]:
        """The followed parent, and its own status."""
        parent = self._parent
        facts: dict[str, Any] = {
            "server": "relay",
            "parent": parent.url,
            "parents": list(self._settings.urls),
            "moves": self._move_count,
        }
        try:
            range_ = await parent.range(self._connections())
        except ServerUnavailable:
            return {**facts, "parent_state": "unreachable"}
        newest = range_.get("max")
        newest = newest if isinstance(newest, dict) else {}
        return {
            **facts,
            "scn": newest.get("scn"),
            "resolved_us": range_.get("resolved_us"),
            "parent_state": range_.get("state"),
            "parent_max": newest,
            "parent_lag_us": range_.get("lag_us"),
        }

    async def close(self) -> None:
        """Close every connection."""
        self._drop_held()
        await self._http.close()
