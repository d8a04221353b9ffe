"""Waits for the rows of a batch."""

from __future__ import annotations

import asyncio
import time

from databus.client.application.options import Options
from databus.client.delivery.dispatcher import Dispatcher
from databus.client.delivery.steering import Steering
from databus.client.pulling.raw_windows import wait_for_either
from databus.client.pulling.replay_buffer import ReplayBuffer

_IDLE_ROUNDS = 3
"""Rounds of the loop without new frames after which the connection has none."""
_REST_S = 0.02
"""How long a batch waits for the rest of a window that has arrived in part."""


async def gather(
    buffer: ReplayBuffer,
    dispatcher: Dispatcher,
    steering: Steering,
    pulling: asyncio.Task[None],
    options: Options,
) -> bool:
    """Wait for more rows, if there are some and fewer than a batch may have.

    Rows that are in the connection have arrived: the loop runs until the puller finds no more.
    A request of the steering, and the end of pulling, end the wait.  Returns whether the request
    has to be looked at before the next call.
    """
    began_s = time.monotonic()
    idle_rounds, end, row_count = 0, buffer.end, buffer.waiting_rows()
    while (
        0 < row_count < options.batch_rows
        and buffer.held_bytes < options.buffer_bytes
        and not (steering.has_request or pulling.done() or buffer.is_cut)
    ):
        if idle_rounds < _IDLE_ROUNDS:
            await asyncio.sleep(0)
            idle_rounds += 1
            if buffer.end == end:
                continue
        else:
            wait_s = 0.0 if dispatcher.in_window else options.batch_ms / 1000
            if wait_s < _REST_S and not dispatcher.in_window and dispatcher.awaits_rest():
                wait_s = _REST_S
            left_s = began_s + wait_s - time.monotonic()
            if left_s <= 0:
                break
            buffer.wake.clear()
            await wait_for_either(buffer.wake, pulling, left_s)
        idle_rounds, end, row_count = 0, buffer.end, buffer.waiting_rows()
    can_seek = steering.target is not None and not dispatcher.in_window
    return steering.is_stopping or steering.is_paused or can_seek
