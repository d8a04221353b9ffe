"""Imports a process's modules quickly, before it begins its work.

What does not belong here: which modules those are.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Import modules in this block: the collector does not run meanwhile, and never scans them.

    A server's modules are some 250,000 objects that live as long as it does.  Scanning them
    repeatedly during the imports took a tenth of its start.  Each later full collection would
    scan them while readers wait.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
