"""Children of a process that has imported everything.  ``python -m`` with a module as argument.

A new interpreter takes a second of processor time before its first line.  A line on standard input
holds the settings of a child in JSON, which it gives to ``main`` of the module.  The answer is two
lines: the child's process id, and, when it has ended, its exit code (negative for a signal).  A
module that has ``warm_up`` is warmed up once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.waiting import within

_ROOT = Path(__file__).parents[2]


class WarmProcess:
    """Starts children, one at a time.

    Owner: the test, which uses it inside ``warm_process``.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def start(self, settings: dict[str, Any]) -> int:
        """The process id of a new child."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        return await self._number()

    async def exit_code(self) -> int:
        """How the child ended, once it has."""
        return await self._number()

    async def _number(self) -> int:
        assert self._process.stdout is not None
        async with within(60):
            return int(await self._process.stdout.readline())


@contextlib.asynccontextmanager
async def warm_process(module: str) -> AsyncIterator[WarmProcess]:
    """A process that has imported ``module``; it ends with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, module, cwd=_ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield WarmProcess(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.kill()
        await process.wait()


def main(name: str) -> None:
    """One child for each line of standard input, until its end."""
    module = importlib.import_module(name)
    if hasattr(module, "warm_up"):
        module.warm_up()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(module.main, json.loads(line))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(program: Any, settings: dict[str, Any]) -> None:
    """Runs it and ends the process: only the parent reads standard input to its end."""
    code = 1
    try:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # The answers are the parent's.
        program(settings)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
