"""The client and a relay whose writer overwrites what is being sent: nothing of it is delivered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from databus.client import Consumer, DatabusClient, Event
from databus.common.errors import ScnTooOld
from databus.common.frame.frame_format import Buffer, Op
from databus.relay.serving.socket_writer import SocketWriter
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import within

RING_BYTES = 1 << 20


def alike(scn: int) -> bytes:
    """Windows of one length: those of a later lap lie exactly where those of this one lay."""
    return window(scn, [(Op.INSERT, ORDERS, 7)], text="z" * 3000, txid=f"{scn:09}")


class Seen(Consumer):
    """Remembers the windows of the rows that it is given."""

    def __init__(self) -> None:
        self.scns: list[int] = []

    def onDataEvent(self, event: Event) -> None:
        self.scns.append(event.scn)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("taken_before", [0, 20])
async def test_a_client_that_is_lapped_in_mid_send_gets_scn_too_old_and_has_seen_no_later_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_before: int
) -> None:
    live = LiveRelay(tmp_path, ring_bytes=RING_BYTES)
    per_lap = RING_BYTES // len(alike(1))
    for scn in range(1, per_lap + 1):
        live.append(alike(scn))
    write, is_lapped = SocketWriter._write, False

    def lap_before_writing(sender: SocketWriter, parts: Sequence[Buffer]) -> int:
        nonlocal is_lapped
        if not is_lapped and taken_before and sender.write_count == 0:
            return write(sender, (parts[0], parts[1][: taken_before * len(alike(1))], b""))
        if not is_lapped:
            is_lapped = True
            for scn in range(per_lap + 1, 2 * per_lap + 1):
                live.append(alike(scn))
        return write(sender, parts)

    monkeypatch.setattr(SocketWriter, "_write", lap_before_writing)
    async with live.served():
        seen = Seen()
        client = DatabusClient(database="shop", relays=[live.url], consumer=seen, start="oldest")
        with pytest.raises(ScnTooOld):
            async with within(100):
                await client.serve()
    assert is_lapped
    assert seen.scns == list(range(1, len(seen.scns) + 1))
    assert len(seen.scns) <= per_lap
    live.close()
