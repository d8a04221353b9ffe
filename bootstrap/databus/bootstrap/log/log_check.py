"""``databus inspect log``: every page and every frame of a hot log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from databus.bootstrap.log.hot_log import FOLDER, HotLog
from databus.common.storage.lmdb_file import check_lmdb


def describe_log(folder: Path) -> dict[str, Any]:
    """What ``databus inspect log`` shows of a database's ``folder``, or of the log in it.

    Raises: StoreError: there is none, or it breaks an invariant; FormatError: it is damaged.
    """
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    check_lmdb(folder, whole=True)
    log = HotLog(folder, read_only=True)
    try:
        state = log.state()
        return {
            "database": state.database,
            "clock": state.clock,
            "start": state.start.to_json(),
            "window": state.window.to_json(),
            "checkpoint": state.last.to_json(),
            "frame_bytes": state.frame_bytes,
            "map_bytes": log.map_bytes(),
            "frames": log.check(),
            "schemas": [
                {"source": schema.source, "fingerprint": f"{schema.fingerprint:016x}"}
                for schema in log.schemas()
            ],
            "seeding": log.note("seeding") or {},
            "gaps": log.note("gaps") or [],
        }
    finally:
        log.close()
