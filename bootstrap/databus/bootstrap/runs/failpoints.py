"""Steps at which a crash test ends this process.

``DATABUS_FAILPOINT=seal.manifest_switched`` in the environment makes the process kill itself
with SIGKILL the first time that it reaches the step of this name.  Unset, a step costs one
dictionary look-up; steps are a few per seal or merge, never per event.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "DATABUS_FAILPOINT"

STEPS = (
    "append.before_commit",
    "append.committed",
    "seal.begun",
    "seal.file_written",
    "seal.record_written",
    "seal.manifest_switched",
    "seal.log_dropped",
    "merge.begun",
    "merge.rows_written",
    "merge.files_written",
    "merge.manifest_switched",
    "manifest.file_written",
    "manifest.renamed",
    "collect.manifest_switched",
    "collect.one_deleted",
    "sweep.one_deleted",
    "restore.one_copied",
    "restore.manifest_switched",
)
"""Every step that can be named, in the order of one row's way."""


def reach(step: str) -> None:
    """Kill this process if the environment names this step."""
    if os.environ.get(VARIABLE) == step:
        os.kill(os.getpid(), signal.SIGKILL)
