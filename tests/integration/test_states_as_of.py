"""States as of moments that have passed, and what changed between them, on real databases.

The shop is written while the applier merges; now and then it rests, and what its tables hold then
is noted.  In the end the bootstrap server is asked for each of these moments.
"""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.parse
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from databus.cli.shop import Rows, differences
from databus.common.frame import FrameView, Op, iter_frames
from databus.relay.registry import RegistryReader
from tests.support.processes import Processes
from tests.support.system import System, Workload, server_shop, stored_facts, wait_for, wait_s

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

MOMENTS = 5
REST_S = 1.2
"""MariaDB's commits have whole seconds: between two of them a time means one state."""


class Moment(NamedTuple):
    scn: int
    at: str
    rows: dict[str, Rows]


def asked(system: System, path: str, **query: Any) -> list[FrameView]:
    """The frames of an answer that is whole."""
    url = f"{system.bootstrap_url}/v1/shop/{path}?{urllib.parse.urlencode(query)}&format=frames"
    with urllib.request.urlopen(url, timeout=60) as answer:
        views = list(iter_frames(answer.read()))
    assert views[-1].op == Op.CHECKPOINT, "the answer was cut off"
    return [view for view in views if not view.is_control]


def applied(system: System, frames: list[FrameView], before: dict[str, Rows]) -> dict[str, Rows]:
    """The tables after some changes to them."""
    registry = RegistryReader(system.folder / "relay" / "shop" / "schemas.jsonl")
    registry.refresh()
    tables = {source: dict(rows) for source, rows in before.items()}
    for view in frames:
        schema = registry.schemas.by_fingerprint(view.schema_fp)
        rows = tables.setdefault(schema.source, {})
        key = tuple(schema.decode_key(view.key).values())
        if view.op == Op.DELETE:
            rows.pop(key, None)
        else:
            assert view.after is not None
            rows[key] = schema.decode_row(view.after)
    return tables


def has_come_to(system: System, scn: int) -> bool:
    try:
        asked(system, "snapshot", scn=scn)
    except urllib.error.HTTPError:
        return False
    return True


@pytest.mark.parametrize("kind", ["mariadb", "postgres"])
def test_states_and_changes_between_them_are_what_the_source_held(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, processes: Processes
) -> None:
    shop, url = server_shop(kind, request.getfixturevalue(f"{kind}_database"))
    system = System(tmp_path, shop, url, processes, ring_bytes="8MiB")
    system.start_relay()
    system.start_bootstrap()
    system.start_consumer()
    with Workload(shop, per_s=100):
        wait_for(lambda: "windows_online" in stored_facts(system.mirror())[0], "it follows")
    moments: list[Moment] = []
    for _ in range(MOMENTS):
        with Workload(shop, per_s=250):
            wait_s(2)
        system.wait_until_equal()
        wait_s(REST_S)
        checkpoint = json.loads(stored_facts(system.mirror())[0]["checkpoint"])
        moments.append(Moment(checkpoint["scn"], datetime.now(UTC).isoformat(), shop.rows()))
        wait_s(REST_S)
    assert len({moment.scn for moment in moments}) == MOMENTS
    with Workload(shop, per_s=250):  # They are asked for while the writing goes on.
        wait_for(lambda: has_come_to(system, moments[-1].scn), "the log has the last moment")
        for moment in moments:
            for point in (moment.scn, moment.at):
                found = applied(system, asked(system, "snapshot", scn=point), {})
                assert not differences(moment.rows, found), f"as of {point}"
        for before, after in itertools.pairwise(moments):
            for mode in ("net", "all"):
                changes = asked(system, "changes", since=before.scn, until=after.scn, mode=mode)
                assert not differences(after.rows, applied(system, changes, before.rows)), mode
                keys = [(view.source_id, bytes(view.key)) for view in changes]
                assert mode == "all" or len(keys) == len(set(keys)), "each row once"
