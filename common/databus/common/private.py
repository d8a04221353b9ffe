"""Hides passwords in URLs, and makes files that only their user can read.

A URL's password is everything between the first colon after ``://`` and the last ``@``.  A raw
``/``, ``?`` or ``#`` in it makes the URL unusable, but must not reveal it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Self

_PASSWORD = re.compile(r"(://[^\s:/?#@]*):\S*@")
UMASK = 0o077
FILE_MODE, FOLDER_MODE = 0o600, 0o700


class HiddenUrl(str):
    """A URL that does not show its password when printed, logged or formatted.

    Other methods of ``str``, and ``+``, give a plain text with the password.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """A ``HiddenUrl`` as ``text`` retains its password."""
        return super().__new__(cls, text.reveal if isinstance(text, HiddenUrl) else text)

    @property
    def reveal(self) -> str:
        """The URL with its password, for the driver alone."""
        return str.__str__(self)

    def __str__(self) -> str:
        return without_passwords(self.reveal)

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def without_passwords(text: str) -> str:
    """The text with ``***`` for the password of each URL in it."""
    return _PASSWORD.sub(r"\1:***@", text) if "://" in text and "@" in text else text


def keep_files_private() -> None:
    """Let this process and its children make files that their user alone can read."""
    os.umask(UMASK)


def private_opener(path: str, flags: int) -> int:
    """For ``open``: a new file is its user's alone, whatever the umask."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for its user alone."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)
