"""Work that runs to its end although its caller is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from databus.common.processes.completion import completed


async def test_its_result_or_error_comes_back() -> None:
    async def done() -> str:
        return "done"

    async def refused() -> None:
        raise ValueError("no")

    assert await completed(done()) == "done"
    with pytest.raises(ValueError, match="no"):
        await completed(refused())


@pytest.mark.parametrize("cancelled_times", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_caller_ends_when_the_work_has_ended(
    cancelled_times: int, fails: bool
) -> None:
    may_end, ended = asyncio.Event(), False

    async def work() -> None:
        nonlocal ended
        await may_end.wait()
        ended = True
        if fails:
            raise ValueError("of no more use")

    caller = asyncio.create_task(completed(work()))
    await asyncio.sleep(0)
    for _ in range(cancelled_times):
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended
