"""``where`` of a route: the target has exactly the rows of which the predicate is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from databus.client.sinks import Sink, SinkBatch, SinkProcess
from databus.common.checkpoint import Checkpoint
from databus.common.errors import ConfigError, SinkRefused
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from tests.client.conftest import StartServer
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.shop import ITEMS, ORDERS, orders, row, window
from tests.client.sinks.sink_runs import Watched, sink_config, sqlite_mirror, sqlite_rows
from tests.client.sinks.test_sqlite_mirror import WIDE, tables_of

PAID = {"source": "shop.orders", "where": "state = 'paid'"}
NOTE_ABSENT = bytes([0b100])
IN = {"state": "paid"}
OUT = {"state": "new"}


class Recorded(Sink):
    """Notes what it is given: the op, and the row after the change."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Any]] = []

    def write(self, batch: SinkBatch) -> None:
        self.rows += [(one.op, one.value) for one in batch.rows()]

    def commit(self, checkpoint: Checkpoint) -> None:
        """The rows are in memory."""


@pytest.mark.parametrize("seed", range(3))
async def test_a_mirror_has_the_rows_of_the_predicate(
    seed: int, scripted: StartServer, tmp_path: Path
) -> None:
    windows, tables = workload(seed, 30)
    routes = [
        {"source": "shop.orders", "where": "state LIKE '%1' OR id > 15"},
        {"source": "*", "where": "name LIKE '%2' AND NOT name LIKE '1%'"},
    ]
    path = tmp_path / "mirror.db"
    server = await scripted(*windows)
    await Watched(sink_config(server.url, route=routes), sqlite_mirror(path)).until_scn(30)
    assert tables_of(path) == {
        "shop.orders": {
            key: one
            for key, one in tables["shop.orders"].items()
            if one["state"].endswith("1") or one["id"] > 15
        },
        "shop.items": {
            key: one
            for key, one in tables["shop.items"].items()
            if one["name"].endswith("2") and not one["name"].startswith("1")
        },
    }


@pytest.mark.parametrize(
    ("op", "before", "after", "given"),
    [
        (Op.INSERT, None, IN, [("c", "paid")]),
        (Op.INSERT, None, OUT, []),
        (Op.UPDATE, OUT, IN, [("c", "paid")]),
        (Op.UPDATE, IN, IN, [("u", "paid")]),
        (Op.UPDATE, IN, OUT, [("d", None)]),
        (Op.UPDATE, OUT, OUT, []),
        (Op.UPDATE, None, IN, [("u", "paid")]),
        (Op.UPDATE, None, OUT, [("d", None)]),
        (Op.READ, None, IN, [("r", "paid")]),
        (Op.READ, None, OUT, [("d", None)]),
        (Op.DELETE, IN, None, [("d", None)]),
        (Op.DELETE, OUT, None, []),
        (Op.DELETE, None, None, [("d", None)]),
        (Op.TRUNCATE, None, None, [("t", None)]),
    ],
)
async def test_what_a_change_is_for_the_target(
    op: Op, before: Any, after: Any, given: Any, scripted: StartServer, tmp_path: Path
) -> None:
    def encoded(image: dict[str, Any] | None) -> bytes | None:
        return None if image is None else ORDERS.encode_row(row(ORDERS, 1, image["state"]))

    builder = WindowBuilder(1, 1_700_000_000_000_000)
    key = b"" if op is Op.TRUNCATE else ORDERS.encode_key([1])
    builder.event(
        op,
        ORDERS.source_id,
        ORDERS.fingerprint,
        key,
        before=encoded(before),
        after=encoded(after),
    )
    server = await scripted(builder.end("tx1"))
    sink = Recorded()
    config = sink_config(server.url, route=[PAID], data_dir=str(tmp_path))
    await Watched(config, sink).until_scn(1)
    assert [(op, value and value["state"]) for op, value in sink.rows] == given


async def test_a_row_that_enters_is_whole_or_the_sink_stops(
    scripted: StartServer, tmp_path: Path
) -> None:
    def paying(scn: int, before: dict[str, object] | None) -> bytes:
        """An update of the state; the source leaves the note out, which did not change."""
        builder = WindowBuilder(scn, 1_700_000_000_000_000)
        builder.event(
            Op.UPDATE,
            WIDE.source_id,
            WIDE.fingerprint,
            WIDE.encode_key([scn]),
            before=None if before is None else WIDE.encode_row(before),
            after=WIDE.encode_row({"id": scn, "state": "paid", "note": None}),
            absent=NOTE_ABSENT,
        )
        return builder.end(f"tx{scn}")

    async def mirrored(where: str, path: Path, *windows: bytes) -> list[tuple[Any, ...]]:
        server = await scripted(*windows, schemas=[WIDE])
        config = sink_config(server.url, route=[{"source": "*", "where": where}])
        await Watched(config, sqlite_mirror(path)).until_scn(len(windows))
        return sqlite_rows(path, "SELECT id, state, note FROM orders")

    whole = [paying(scn, {"id": scn, "state": "new", "note": f"n{scn}"}) for scn in (1, 2)]
    rows = await mirrored("state = 'paid' AND note = 'n1'", tmp_path / "mirror.db", *whole)
    assert rows == [(1, "paid", "n1")]
    with pytest.raises(SinkRefused, match=r"column note of the row .* REPLICA IDENTITY FULL"):
        await mirrored("state = 'paid'", tmp_path / "partial.db", paying(1, None))
    with pytest.raises(SinkRefused, match="the predicate is not known"):
        await mirrored("note = 'n1'", tmp_path / "unknown.db", paying(1, None))


async def test_a_predicate_that_does_not_fit_stops_the_sink(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1), window(2, ("c", ITEMS, 1, "pen")))
    for where in ("state = 'paid'", "state > 5"):
        config = sink_config(server.url, route=[{"source": "*", "where": where}])
        with pytest.raises(SinkRefused, match=r"does not fit shop\.(items|orders)"):
            await Watched(config, sqlite_mirror(tmp_path / "mirror.db")).until_scn(2)
    wrong = sink_config(server.url, route=[{"source": "*", "where": "state ="}])
    with pytest.raises(ConfigError, match="is no SQL predicate"):
        SinkProcess(wrong, Recorded())
