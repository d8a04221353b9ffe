"""One table over HTTP, where the disk or the connection fails."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest

from databus.client.tables import table_reader
from databus.client.tables.arrow_rows import RowDecoder
from databus.client.tables.table_reader import Range, TableAddress, TableReader
from databus.common.checkpoint import Position
from databus.common.errors import ServerUnavailable, StoreError
from databus.common.frame import frame_format
from tests.client.conftest import StartServer
from tests.client.shop import orders
from tests.support.broken_body import breaking_off


def read(url: str) -> list[Any]:
    """The changes after SCN 1 up to SCN 3."""
    address = TableAddress("shop", "shop.orders", relays=(url,), give_up_s=0.1)
    reader = TableReader(address)
    decoder = RowDecoder(reader.schema(), reader.schema_of)
    requested = Range("all", Position(1, 1), Position(3, 1), reader.clock)
    return [row for batch in reader.batches(requested, decoder) for row in batch.to_pylist()]


async def test_the_changes_of_a_range_are_read(scripted: StartServer) -> None:
    server = await scripted(*[orders(scn, scn) for scn in range(1, 6)])
    rows = await asyncio.to_thread(read, server.url)
    assert [row["id"] for row in rows] == [2, 3]


async def test_the_time_of_a_transfer_is_not_silence(
    scripted: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await scripted(*[orders(scn, scn) for scn in range(1, 6)])
    clock, broken, blocks = [1000.0], [], table_reader._blocks

    def slow(answer: Any, url: str) -> Any:
        for data, columns in blocks(answer, url):
            clock[0] += 3600.0  # far longer than give_up_s
            if broken:
                yield data, columns
                continue
            part = data[: int(columns.offset[int((columns.scn >= 3).argmax())])]
            yield part, frame_format.scan(part, verify=False)
            broken.append(url)
            raise ServerUnavailable(f"{url} broke off")

    monkeypatch.setattr(table_reader, "_blocks", slow)
    monkeypatch.setattr(table_reader.time, "monotonic", lambda: clock[0])
    rows = await asyncio.to_thread(read, server.url)
    assert [row["id"] for row in rows] == [2, 3]
    assert broken


async def test_a_full_disk_is_an_error_at_once_and_not_a_server_that_fails(
    scripted: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await scripted(*[orders(scn, scn) for scn in range(1, 6)])
    monkeypatch.setattr(
        tempfile,
        "TemporaryFile",
        lambda **_: Path("/dev/full").open("r+b", buffering=0),  # noqa: SIM115 - the spool closes it
    )
    with pytest.raises(StoreError, match="No space left on device"):
        await asyncio.to_thread(read, server.url)
    assert len(server.streams()) == 1


@pytest.mark.parametrize("status", [404, 503])
def test_an_error_that_breaks_off_is_a_server_that_does_not_answer(status: int) -> None:
    with breaking_off(status) as url, pytest.raises(ServerUnavailable, match="broke off"):
        read(url)
