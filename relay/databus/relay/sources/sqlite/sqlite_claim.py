"""One relay for each SQLite file: the relay prunes the log, so a second one would lose rows.

The claim is a socket in Linux's abstract namespace, named after the file's device and inode.  The
kernel gives it to one process at a time and takes it back when the process ends, however it ends.
Nothing is written into the database's folder.
"""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from databus.common.errors import SourceUnavailable


def claim(path: str) -> socket.socket:
    """Claim the file at ``path`` until the socket is closed.

    Raises:
        SourceUnavailable: another relay of this machine has it, or the file does not exist.
    """
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        status = Path(path).stat()
        found.bind(f"\0databus-sqlite-{status.st_dev:x}-{status.st_ino:x}")
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise SourceUnavailable(
                f"SQLite database {path}: another relay captures it, and its log serves one relay. "
                'Follow that relay instead: url = "relay+http://HOST:PORT/DATABASE"'
            ) from error
        raise SourceUnavailable(f"SQLite database {path}: {error.strerror}") from error
    return found
