"""Block mode: a reader has everything up to a position, and the ring may evict it."""

from __future__ import annotations

from typing import Any

from databus.common.checkpoint import SEQ_END, Position
from databus.common.config import DatabaseConfig
from databus.common.errors import BadRequest
from databus.relay.capture.intake import Intake
from databus.relay.ring.data_folder import DatabaseFolder
from databus.relay.ring.ring import Ring


def release(
    intake: Intake | None, config: DatabaseConfig, folder: DatabaseFolder, position: Position
) -> dict[str, Any]:
    """Release a ring in block mode up to ``position``; returns the range that is left.

    Raises:
        BadRequest: the ring is not in block mode, or has not reached the position.
        ScnTooOld: it was released before, and is gone.
    """
    if intake is None or not intake.ring.blocks:
        raise BadRequest(
            f"{config.name} is not in block mode: nothing waits for a release; "
            "only a ring that another relay fills, with url = relay+http://.. and "
            "options = { block = true } when it is made, waits"
        )
    state = intake.ring.state
    if position > Position(state.max.scn, SEQ_END):
        raise BadRequest(f"{position} was never served: the newest frame is {state.max}")
    with Ring.open_reader(folder.path) as reader:
        ring_position = reader.find(position)
    intake.ring.release(ring_position)
    return {"prev": state.prev.to_json(), "max": state.max.to_json()}
