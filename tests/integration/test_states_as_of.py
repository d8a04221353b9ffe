"""States as of moments that have passed, what changed between them, and whole bootstraps, on real
databases.

The shop is written while the applier merges; now and then it rests, and what its tables hold then
is noted.  In the end the test reads each of these moments from the bootstrap server.  Beside the
shop one table is written without a pause by a writer that records what it held after each
transaction: so the state that a bootstrap ends with, in the middle of all that, has something to be
equal to.  With PostgreSQL all runs lie on S3.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from databus.cli.demo.shop import Rows, Shop, differences
from databus.common.frame.frame_format import FrameView, Op, iter_frames
from databus.relay.ring.schema_registry import RegistryReader
from tests.support.capture import upsert
from tests.support.processes import Processes
from tests.support.s3_server import S3Server
from tests.support.system import System, Workload, server_shop, stored_facts, wait_for, wait_s
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

MOMENTS = 5


class Moment(NamedTuple):
    scn: int
    at: str
    rows: dict[str, Rows]


def changes_of(system: System, path: str, **query: Any) -> list[FrameView]:
    """The row changes of an answer that is whole."""
    return answer_of(system, path, **query)[0]


def answer_of(system: System, path: str, **query: Any) -> tuple[list[FrameView], str]:
    """The row changes of an answer that is whole, and the checkpoint that it ends with."""
    url = f"{system.bootstrap_url}/v1/shop/{path}?{urllib.parse.urlencode(query)}&format=frames"
    with urllib.request.urlopen(url, timeout=60 * PATIENCE) as answer:
        views = list(iter_frames(answer.read()))
    assert views[-1].op == Op.CHECKPOINT, "the answer was cut off"
    changes = [view for view in views if not view.is_control]
    return changes, bytes(views[-1].after or b"").decode()


def applied(system: System, frames: list[FrameView], before: dict[str, Rows]) -> dict[str, Rows]:
    """The tables after some changes to them."""
    registry = RegistryReader(system.folder / "relay" / "shop" / "schemas.jsonl")
    registry.refresh()
    tables = {source: dict(rows) for source, rows in before.items()}
    for view in frames:
        schema = registry.schemas.by_fingerprint(view.schema_fp)
        upsert(tables.setdefault(schema.source, {}), schema, view)
    return tables


TABLES = ("ticks", "tocks")


class TickingShop(Shop):
    """A shop with two more small tables, written by numbered transactions over both.

    Row 0 of the first has the number of the last one, so any state shows which transaction it is
    of, and ``history`` what the tables held then.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.history: list[dict[int, int]] = [{}]

    def rows(self) -> dict[str, Rows]:
        found = super().rows()
        with contextlib.closing(self.connect()) as connection:
            cursor = connection.cursor()
            for table in TABLES:
                cursor.execute(f"SELECT id, tick FROM {table}")
                rows = {(key,): {"id": key, "tick": tick} for key, tick in cursor.fetchall()}
                found[f"{self.dialect.namespace}.{table}"] = rows
        return found

    def create(self, **of: int) -> None:
        with contextlib.closing(self.connect()) as connection:
            cursor = connection.cursor()
            for table in TABLES:
                cursor.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, tick INT NOT NULL)")

    @contextlib.contextmanager
    def session(self) -> Iterator[Callable[[], str]]:
        """Transactions of the shop and numbered ones, alternately."""
        with super().session() as step, contextlib.closing(self.connect()) as connection:
            cursor = connection.cursor()

            def both() -> str:
                self._tick(cursor)
                return step()

            yield both

    def _tick(self, cursor: Any) -> None:
        tick, rows = len(self.history), dict(self.history[-1])
        cursor.execute("BEGIN")
        for key in (0, *self._random.sample(range(1, 60), 3)):
            table = TABLES[key % 2]
            if key not in rows:
                cursor.execute(f"INSERT INTO {table} VALUES ({key}, {tick})")
            elif key and self._random.random() < 0.3:
                cursor.execute(f"DELETE FROM {table} WHERE id = {key}")
                del rows[key]
                continue
            else:
                cursor.execute(f"UPDATE {table} SET tick = {tick} WHERE id = {key}")
            rows[key] = tick
        # Known before it is committed: it may be read at once.
        self.history.append(rows)
        cursor.execute("COMMIT")


class Follower:
    """A state that is brought up by one bootstrap after the other, from where the last ended."""

    def __init__(self, system: System, shop: TickingShop) -> None:
        self._system, self._shop = system, shop
        self._state: dict[str, Rows] = {}
        self._checkpoint = ""
        self.seen: list[int] = []
        """The transactions of whose states it was."""

    def resume(self) -> None:
        query = {"checkpoint": self._checkpoint} if self._checkpoint else {}
        sources = ",".join(f"{self._shop.dialect.namespace}.{table}" for table in TABLES)
        changes, self._checkpoint = answer_of(self._system, "bootstrap", sources=sources, **query)
        assert json.loads(self._checkpoint)["mode"] == "online"
        self._state = applied(self._system, changes, self._state)
        rows = {row["id"]: row["tick"] for one in self._state.values() for row in one.values()}
        assert rows == self._shop.history[rows[0]], f"as after transaction {rows[0]}"
        self.seen.append(rows[0])


def keep_runs_on_s3(system: System, s3: S3Server) -> None:
    """Nothing has been started yet; the configuration ends with the bootstrap's section."""
    options = s3.options()
    keys = {name: getattr(options, name) for name in ("endpoint", "region", "access_key")}
    keys["secret_key"] = options.secret_key.get_secret_value()
    lines = [f'{name} = "{value}"' for name, value in keys.items()]
    # Fewer files: the server is slow, and shares our processor.
    text = system.config.read_text().replace('segment_every = "1s"', 'segment_every = "3s"')
    lines = [text, f'store = "{s3.empty_prefix()}"', "[bootstrap.s3]", *lines]
    system.config.write_text("\n".join(lines))


def rest(kind: str) -> None:
    """Wait until later commits have a later time: those of MariaDB have whole seconds."""
    wait_s(1.05 - time.time() % 1 if kind == "mariadb" else 0.01)


def status_of(system: System) -> dict[str, Any]:
    """The bootstrap's status of the shop."""
    with urllib.request.urlopen(
        f"{system.bootstrap_url}/v1/status", timeout=9 * PATIENCE
    ) as answer:
        found: dict[str, Any] = json.load(answer)["databases"][0]
    return found


def has_come_to(system: System, scn: int) -> bool:
    try:
        changes_of(system, "snapshot", scn=scn)
    except urllib.error.HTTPError:
        return False
    return True


@pytest.mark.parametrize("kind", ["mariadb", "postgres"])
def test_states_and_changes_between_them_are_what_the_source_held(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, processes: Processes
) -> None:
    shop, url = server_shop(kind, request.getfixturevalue(f"{kind}_database"))
    shop = TickingShop(shop.dialect, shop.connect)
    shop.create()
    system = System(tmp_path, shop, url, processes, ring_bytes="8MiB")
    if kind == "postgres":
        keep_runs_on_s3(system, request.getfixturevalue("s3"))
    system.start_relay()
    system.start_bootstrap()
    system.start_consumer()
    with Workload(shop, per_s=100):
        wait_for(lambda: "windows_online" in stored_facts(system.mirror())[0], "it follows")
    moments: list[Moment] = []
    followers: list[Follower] = []
    for _ in range(MOMENTS):
        with Workload(shop, per_s=250):
            followers.append(Follower(system, shop))
            for _ in range(4):
                wait_s(0.5)
                followers[-1].resume()
        system.wait_until_equal()
        checkpoint = json.loads(stored_facts(system.mirror())[0]["checkpoint"])
        moments.append(Moment(checkpoint["scn"], datetime.now(UTC).isoformat(), shop.rows()))
        rest(kind)
    assert len({moment.scn for moment in moments}) == MOMENTS
    with Workload(shop, per_s=250):  # They are read while the writing continues.
        wait_for(lambda: has_come_to(system, moments[-1].scn), "the log has the last moment")
        wait_for(lambda: len(status_of(system)["applies"]) >= 2, "runs are merged meanwhile")
        for one in followers:
            one.resume()  # The first of them have been away for long.
        for moment in moments:
            for point in (moment.scn, moment.at):
                found = applied(system, changes_of(system, "snapshot", scn=point), {})
                assert not differences(moment.rows, found), f"as of {point}"
        for before, after in itertools.pairwise(moments):
            for mode in ("net", "all"):
                changes = changes_of(
                    system, "changes", since=before.scn, until=after.scn, mode=mode
                )
                assert not differences(after.rows, applied(system, changes, before.rows)), mode
                keys = [(view.source_id, bytes(view.key)) for view in changes]
                assert mode == "all" or len(keys) == len(set(keys)), "each row once"
    assert status_of(system)["store"].startswith("s3:") == (kind == "postgres")
    for one in followers:
        assert one.seen == sorted(one.seen), "no bootstrap ended before the one before"
        assert one.seen[0] < one.seen[-1]
