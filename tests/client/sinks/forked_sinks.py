"""Runs sinks in children of a process that has imported everything: ``python -m ... ``.

A line on standard input is a configuration in JSON.  The answer is two lines: the child's process
id, and, when it has ended, its exit code (negative for a signal).
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from databus.client.application.frame_blocks import Block
from databus.client.sinks.sink_kinds import sink_of
from databus.client.sinks.sink_process import SinkProcess
from databus.client.tables import arrow_rows
from databus.common.sink_config import SinkConfig
from tests.client.shop import ORDERS, orders


def warm_up() -> None:
    """Load the compiled loops, which every child would load again."""
    block = Block(orders(1, 1) + orders(2, 1), bootstrap=False)
    data = np.frombuffer(block.data, dtype=np.uint8)
    decoder = arrow_rows.RowDecoder(ORDERS, lambda _: ORDERS, metadata=arrow_rows.METADATA.names)
    decoder.batch(data, block.columns, np.array([0, 2]))


def main() -> None:
    warm_up()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            config = SinkConfig.model_validate(json.loads(line))
            SinkProcess(config, sink_of(config), reconnect_s=0.001).run()
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
