"""The relays of a cluster in the order in which a client tries them.  Pure."""

from __future__ import annotations

import random
from typing import Any

from databus.common.errors import FormatError


def relays_of(table: Any, database: str, zone: str, rng: random.Random) -> list[str]:
    """The URLs of the relays that serve ``database``, by the routing table of a cluster.

    Followers come first, those of ``zone`` before the others, then the leader, which has the
    database's work.  The order of equals is random, so that clients spread.

    Raises:
        FormatError: it is no routing table.
    """
    try:
        relays = {one["name"]: one for one in table["relays"]}
        serving = [
            (one["role"] == "leader", bool(zone) and relays[one["relay"]]["zone"] != zone,
             rng.random(), str(relays[one["relay"]]["address"]))
            for found in table["databases"] if found["name"] == database
            for one in found["relays"] if one["state"] == "streaming"
        ]  # fmt: skip
    except (KeyError, TypeError) as error:
        raise FormatError(f"the routing table has no {error}") from error
    return [address for _, _, _, address in sorted(serving)]
