"""A bootstrap that breaks off between two checkpoints continues at another server, row by row."""

from __future__ import annotations

import pytest

from databus.client.testing import Grammar, Recorder
from databus.common.checkpoint import ORIGIN, BootstrapCheckpoint, Position
from databus.common.checkpoint import encode as encode_checkpoint
from databus.common.frame.frame_format import iter_frames
from tests.client.conftest import StartServer
from tests.client.scripted_server import CLOCK, Fault, checkpoint_frame
from tests.client.shop import orders
from tests.client.test_client import consume, make

TARGET = Position(9, 1)


def _row(scn: int) -> bytes:
    return bytes(next(iter_frames(orders(scn, 1))).bytes)


def _checkpoint(number: int, run: str = "run-1") -> bytes:
    checkpoint = BootstrapCheckpoint(
        "shop", CLOCK, since=ORIGIN, target=TARGET, run=run, row=number, position=ORIGIN
    )
    return checkpoint_frame(encode_checkpoint(checkpoint), ORIGIN)


SENT = [_row(1), _row(2), _checkpoint(2), _row(3), _row(4), _row(5)]


@pytest.mark.parametrize("frames", [0, 1, 2])
async def test_a_server_that_continues_there_repeats_no_row(
    scripted: StartServer, frames: int
) -> None:
    relay = await scripted(orders(10, 1), prev=TARGET)
    cut = sum(map(len, SENT[: 3 + frames])) + 1
    urls = []
    for faults in ([Fault(cut_after_bytes=cut)], []):
        server = await scripted(
            bootstrap_rows=SENT, bootstrap_target=TARGET, bootstrap_every=1000, faults=faults
        )
        urls.append(server.url)
    recorder = Recorder()
    client = make(recorder, relay.url, bootstraps=urls, start="bootstrap")
    await consume(client, recorder, 10)
    assert [position.scn for position in recorder.positions] == [1, 2, 3, 4, 5, 10]
    assert "onRollback" not in recorder.calls
    assert client.status.failure_count == 1
    Grammar(recorder.steps).check()


@pytest.mark.parametrize(
    ("other", "errors"),
    [
        ([_row(1), _row(2), _checkpoint(0, "run-2"), _row(3), _row(4), _row(5)], 1),
        ([_row(1), _row(2), _row(3), _row(4), _row(5)], 1),
        # The client has believed the checkpoint, so it requests the rows once more.
        ([_row(1), _row(2), _checkpoint(2), _row(4), _row(5), _row(6)], 2),
        ([_row(1), _row(2), _checkpoint(2), _row(3), _checkpoint(0, "run-2"), _row(5)], 2),
    ],
    ids=["another run", "no checkpoint", "another row", "another run after some rows"],
)
async def test_one_that_continues_elsewhere_has_the_rows_since_the_checkpoint_rolled_back(
    scripted: StartServer, other: list[bytes], errors: int
) -> None:
    relay = await scripted(orders(10, 1), prev=TARGET)
    fault = Fault(cut_after_bytes=sum(map(len, SENT[:5])) + 1)
    servers = [
        await scripted(
            bootstrap_rows=rows, bootstrap_target=TARGET, bootstrap_every=1000, faults=faults
        )
        for rows, faults in ((SENT, [fault]), (other, []))
    ]
    recorder = Recorder()
    urls = [server.url for server in servers]
    client = make(recorder, relay.url, bootstraps=urls, start="bootstrap", reconnect_s=0.001)
    await consume(client, recorder, 10)
    assert client.status.failure_count == errors
    assert "onRollback" in recorder.calls
    at = len(recorder.calls) - 1 - recorder.calls[::-1].index("onRollback")
    after = [step.what[2].scn for step in recorder.steps[at:] if step.call == "onDataEvent"]
    assert after[-4:] == [3, 4, 5, 10], "each of them once after it, from either server"
    assert after.count(5) == 1
