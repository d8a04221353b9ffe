"""Files that are replaced as a whole: after a kill or a power loss there is the old one or the new.

What belongs here: the order of writing, syncing and renaming.  What does not: locks.  The caller
makes sure that no other process replaces the same file.
"""

from __future__ import annotations

import os
from pathlib import Path

from databus.common.errors import StoreError
from databus.common.private import private_opener


def replace_file(
    path: Path, content: bytes, *, durable: bool = True, beside: Path | None = None
) -> None:
    """Replace ``path`` atomically by a file that only its user can read.

    The content is first in the file ``beside``, which is ``path`` with ``.new`` after it unless it
    is given.

    Durability: with ``durable``, the content and the name are on disk.
    Raises:
        StoreError: the disk refused it; ``path`` is as before, or already the new file.
    """
    beside = beside or path.with_name(f"{path.name}.new")
    try:
        with open(beside, "wb", buffering=0, opener=private_opener) as file:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
            if durable:
                os.fsync(file.fileno())
        beside.replace(path)
        if durable:
            sync_path(path.parent)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
