"""What the status of relays and bootstrap servers shows: clocks, versions, lag against retention.

Every function here is pure: documents in, symptoms out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from databus.cli.doctor.symptoms import Symptom, byte_count, duration

SKEW_S = 1.0
"""Difference of two clocks that is reported, in seconds, beyond the time of the request."""
SILENT_S = 10.0
"""Age of a fetcher's report from which on it counts as silent, in seconds."""
BEHIND_S = 60.0
"""Lag from which on a relay is reported, in seconds."""
SHORT_REACH_S = 3600.0
"""Reach of a full ring below which it is reported, in seconds."""
RISKY_SHARE = 0.5
"""Part of the ring's reach from which on the lag of a reader is reported."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The status of one server."""

    url: str
    document: dict[str, Any]
    asked_us: int
    """When the request was sent, microseconds since the epoch, by this machine's clock."""
    answered_us: int
    """When the answer was there."""

    @property
    def databases(self) -> dict[str, dict[str, Any]]:
        """The databases by name."""
        return {one["name"]: one for one in self.document.get("databases", ())}

    @property
    def is_relay(self) -> bool:
        """Whether it is a relay's; a bootstrap server's otherwise."""
        return "workers" in self.document


def symptoms_of(answers: Sequence[ServerStatus], version: str) -> Iterator[Symptom]:
    """Everything that the answers show, server by server."""
    for answer in answers:
        yield from _of_server(answer, version)
        for name, database in answer.databases.items():
            where = f"{answer.url}/{name}"
            yield from _of_tables(where, database)
            yield from (_of_relay if answer.is_relay else _of_bootstrap)(where, database)
    yield from _between(answers)


def _of_server(answer: ServerStatus, version: str) -> Iterator[Symptom]:
    now_us = answer.document.get("now_us", answer.asked_us)
    ahead_s, behind_s = (now_us - answer.answered_us) / 1e6, (answer.asked_us - now_us) / 1e6
    if max(ahead_s, behind_s) > SKEW_S:
        side = f"{duration(ahead_s)} ahead of" if ahead_s > 0 else f"{duration(behind_s)} behind"
        yield Symptom(
            answer.url,
            f"its clock is {side} that of this machine",
            "Synchronise both clocks (NTP): lag and commit times are wrong by this.",
        )
    theirs = answer.document.get("version", version)
    if theirs != version:
        yield Symptom(
            answer.url,
            f"it runs version {theirs}, and this is {version}",
            "Upgrade the older one; docs/operations/upgrade.md has the order.",
        )


def _of_tables(where: str, database: dict[str, Any]) -> Iterator[Symptom]:
    suspended = database.get("suspended") or {}
    named = [{"source": name, **suspended[name]} for name in suspended]
    for table in [*database.get("tables", ()), *named]:
        yield Symptom(
            where,
            f"{table['source']} is {table['state']} since scn {table['since_scn']}: "
            f"{table['reason']}",
            str(table["cure"]),
            is_fatal=table["state"] == "suspended",
        )


def _of_relay(where: str, database: dict[str, Any]) -> Iterator[Symptom]:
    fetcher = database.get("fetcher") or {}
    state, error = fetcher.get("state", "not running"), fetcher.get("error")
    if state != "streaming":
        yield Symptom(
            where,
            f"the fetcher is {state}" + (f": {error['detail']}" if error else ""),
            str(error.get("hint") or "See the relay's log.") if error else "See the relay's log.",
            is_fatal=state in ("failed", "stopped", "not running"),
        )
    elif fetcher.get("age_s", 0) > SILENT_S:
        yield Symptom(
            where,
            f"the fetcher has reported nothing for {duration(fetcher['age_s'])}",
            f"See whether process {fetcher.get('pid')} hangs, and end it. The relay starts another "
            "one.",
            is_fatal=True,
        )
    elif fetcher.get("lag_us", 0) > BEHIND_S * 1e6:
        yield Symptom(
            where,
            f"the relay is {duration(fetcher['lag_us'] / 1e6)} behind the database",
            "If this grows, give the fetcher a processor of its own, or look for a transaction "
            "that is open for long.",
        )
    for warning in (fetcher.get("source") or {}).get("warnings", ()):
        yield Symptom(where, str(warning), "`databus check` names the setting and its cure.")
    yield from _of_retention(where, database)


def _of_retention(where: str, database: dict[str, Any]) -> Iterator[Symptom]:
    ring = database.get("ring") or {}
    first_us, last_us = database.get("min_commit_us"), database.get("max_commit_us")
    capacity = ring.get("capacity_bytes", 0)
    if not (first_us and last_us and ring.get("used_bytes", 0) > 0.9 * capacity):
        return  # It has everything since the relay began.
    reach_s = max((last_us - first_us) / 1e6, 0.001)
    if reach_s < SHORT_REACH_S:
        wanted = byte_count(capacity * SHORT_REACH_S / reach_s)
        yield Symptom(
            where,
            f"the ring of {byte_count(capacity)} reaches back {duration(reach_s)}",
            f"Set ring_bytes to about {wanted} for an hour; readers that are away for longer need "
            "a bootstrap server.",
        )
    for client in database.get("clients", ()):
        lag_s = (client.get("lag_us") or 0) / 1e6
        if lag_s > RISKY_SHARE * reach_s:
            yield Symptom(
                where,
                f"the reader {client['name']!r} is {duration(lag_s)} behind, and the ring reaches "
                f"back {duration(reach_s)}",
                "Make the reader faster or ring_bytes larger; once it is overtaken, it needs a "
                "bootstrap server.",
            )


def _of_bootstrap(where: str, database: dict[str, Any]) -> Iterator[Symptom]:
    for part, name in (("writer", "log writer"), ("applier", "applier")):
        facts = database.get(part) or {}
        if facts.get("state") in ("failed", "failing"):
            yield Symptom(
                where,
                f"the {name} fails: {facts.get('error', 'see the log')}",
                "Remove the cause; it tries again by itself.",
                is_fatal=part == "writer",
            )
    for gap in database.get("gaps") or ():
        yield Symptom(
            where,
            f"changes are missing in the log: {gap}",
            "Compare and repair the copy: `databus verify --repair`.",
            is_fatal=True,
        )


def _between(answers: Sequence[ServerStatus]) -> Iterator[Symptom]:
    """A bootstrap server that its relays have overtaken, or will."""
    for answer in answers:
        if answer.is_relay:
            continue
        for name, database in answer.databases.items():
            end = (database.get("max") or {}).get("scn")
            starts: list[int] = [
                relay.databases[name]["prev"]["scn"]
                for relay in answers
                if relay.is_relay
                and relay.databases.get(name, {}).get("clock") == database.get("clock")
                and relay.databases[name].get("prev")
            ]
            if end is not None and starts and min(starts) > end:
                yield Symptom(
                    f"{answer.url}/{name}",
                    f"the log ends at scn {end}, and the relays have only what comes after scn "
                    f"{min(starts)}",
                    "Start the bootstrap server, and let it repair the gap: `databus verify "
                    "--repair`.",
                    is_fatal=True,
                )
