"""A child process that ends with its parent, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent_pid: int) -> bool:
    """Let the kernel kill this process when the thread that started it ends.

    The setting survives ``exec``; a forked child does not inherit it.  False if the parent has
    ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent_pid
