"""Ends a child process when this process dies, however it dies.

A program that is killed with -9 cannot clean up after itself.  So each temporary server gets a
guardian: a shell that waits for the end of a pipe that only this process holds open, and then
kills the server.
"""

from __future__ import annotations

import subprocess


class Guardian:
    """Kills one process, or its whole process group, as soon as this interpreter ends.

    Invariants:
        I1. Only this process holds the pipe's writing end: its end means our end.
        I2. After ``release`` the guardian has ended and kills no process, so that a reused
            process id is safe.
    Owner: the process that created it.
    """

    def __init__(self, pid: int, *, group: bool = False) -> None:
        """``group``: the process leads a group of its own, and all of it is to be killed."""
        target = f"-{pid}" if group else str(pid)
        self._shell: subprocess.Popen[bytes] | None = subprocess.Popen(
            ["/bin/sh", "-c", 'read _; exec kill -9 -- "$1" 2>/dev/null', "guardian", target],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """The process has ended in order: end the guardian without a kill."""
        if self._shell is None:
            return
        # Killed before its pipe is closed: the end of the pipe would be its signal.
        self._shell.kill()
        self._shell.wait()
        if self._shell.stdin is not None:
            self._shell.stdin.close()
        self._shell = None
