"""A sink in a child of tests/support/warm_process.py."""

from __future__ import annotations

from typing import Any

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


def main(settings: dict[str, Any]) -> None:
    """Runs the sink of a configuration."""
    config = SinkConfig.model_validate(settings)
    SinkProcess(config, sink_of(config), reconnect_s=0.001).run()
