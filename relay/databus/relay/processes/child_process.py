"""The first code of each process of the relay, before it loads its own modules.

Loading takes a second or more; a supervisor that is killed meanwhile must not leave
a child behind that holds its port.  ``python -m databus.relay.processes.child_process PARENT MODULE
...``
"""

from __future__ import annotations

import importlib
import signal
import sys

from databus.common.processes.loading import loading
from databus.common.processes.parent_process import end_with

MODULE = "databus.relay.processes.child_process"


def follow_parent(parent_pid: int) -> None:
    """Die with the parent; end at once if it is dead already.

    By SIGKILL, which everything here survives: so a relay that was killed can be started
    again at once, and finds neither its port nor a ring taken.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not end_with(parent_pid):
        raise SystemExit(0)


def main() -> None:
    """Follow the parent, then be the ``main`` of the module that the arguments name."""
    _, parent_pid, module, *arguments = sys.argv
    follow_parent(int(parent_pid))
    sys.argv = [module, *arguments]
    with loading():
        loaded = importlib.import_module(module)
    sys.exit(loaded.main(arguments))


if __name__ == "__main__":
    main()
