"""The options of ``spark.read`` and ``spark.readStream``, parsed.  docs/spark.md lists them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from databus.client.tables.batch_limits import BatchLimit
from databus.client.tables.table_reader import TableAddress
from databus.common.config_values import parse_bytes
from databus.common.errors import BadRequest
from databus.common.private import HiddenUrl

PARTITIONS = 4
_EVENTS, _BYTES = "maxEventsPerTrigger", "maxBytesPerTrigger"

_OPTIONS = frozenset(
    (
        *("database", "source", "relays", "bootstraps", "columns", "metadata", "partitions"),
        *("scn", "timestamp", "since", "until", "mode", "start", "give_up_s", "path"),
        *("pushdown", "files", _EVENTS, _BYTES),
    )
)
_WILD = frozenset(",*?[")
_KNOWN = {name.lower() for name in _OPTIONS}


class FileUse(enum.StrEnum):
    """Whether tasks open the store's files themselves."""

    AUTO = "auto"
    """Where they can; otherwise they read the same rows over HTTP."""
    NEVER = "never"
    ALWAYS = "always"
    """A task that cannot open a file fails."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of one read, parsed."""

    address: TableAddress
    mode: str
    since: str | None
    until: str | None
    start: str
    columns: tuple[str, ...]
    metadata: bool
    partitions: int
    pushdown: bool
    limit: BatchLimit
    files: FileUse

    @property
    def has_globs(self) -> bool:
        """Whether ``source`` may name several tables."""
        return bool(set(self.address.source) & _WILD)


def parse_options(options: Mapping[str, str]) -> ReadOptions:
    """The options as values.

    Raises:
        BadRequest: one is missing, unknown, malformed, or two exclude one another.
    """
    given = {name.lower(): value for name, value in options.items()}
    if unknown := sorted(set(given) - _KNOWN):
        raise BadRequest(f"unknown options {unknown}; known are {sorted(_OPTIONS - {'path'})}")
    for name in ("database", "source"):
        if not given.get(name):
            raise BadRequest(f"the option {name} is missing", parameter=name)
    relays, bootstraps = (
        tuple(map(HiddenUrl, _listed(given.get(name, "")))) for name in ("relays", "bootstraps")
    )
    if not relays and not bootstraps:
        raise BadRequest("give the option bootstraps, relays, or both: URLs, comma separated")
    as_of = [name for name in ("scn", "timestamp") if name in given]
    ranged = [name for name in ("since", "until", "mode") if name in given]
    if len(as_of) > 1 or (as_of and ranged):
        raise BadRequest(f"the options {as_of + ranged} do not go together")
    mode = given.get("mode", "net") if ranged else "state"
    if mode not in ("net", "all", "state"):
        raise BadRequest(f"mode {mode!r} is neither net nor all", parameter="mode")
    try:
        partitions = int(given.get("partitions", PARTITIONS))
        give_up_s = float(given.get("give_up_s", 60))
    except ValueError as error:
        raise BadRequest(f"partitions and give_up_s are numbers: {error}") from None
    if partitions < 1:
        raise BadRequest("partitions is 1 or more", parameter="partitions")
    try:
        files = FileUse(given.get("files", "auto"))
    except ValueError:
        raise BadRequest(
            f"files is one of {', '.join(FileUse)}, not {given['files']!r}", parameter="files"
        ) from None
    return ReadOptions(
        TableAddress(given["database"], given["source"], relays, bootstraps, give_up_s),
        mode,
        given.get("since"),
        given.get(as_of[0]) if as_of else given.get("until"),
        given.get("start", "snapshot" if bootstraps else "oldest"),
        _listed(given.get("columns", "")),
        given.get("metadata", "false").lower() == "true" or bool(ranged),
        partitions,
        given.get("pushdown", "false").lower() == "true",
        _limit(given),
        files,
    )


def _limit(given: Mapping[str, str]) -> BatchLimit:
    events, size = given.get(_EVENTS.lower()), given.get(_BYTES.lower())
    try:
        limit = BatchLimit(
            None if events is None else int(events),
            None if size is None else parse_bytes(size),
        )
    except ValueError as error:
        raise BadRequest(f"{_EVENTS} and {_BYTES} are numbers: {error}") from None
    for name, value in ((_EVENTS, limit.events), (_BYTES, limit.bytes)):
        if value is not None and value < 1:
            raise BadRequest(f"{name} is 1 or more", parameter=name)
    return limit


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
