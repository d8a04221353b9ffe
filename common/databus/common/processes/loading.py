"""Loading what a process is made of, before it begins its work.

What belongs here: what makes a start quick, whatever is loaded.  What does not: which modules
those are.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Load modules in here: the collector neither runs meanwhile nor looks at them ever again.

    A server's modules are some 250,000 objects that live as long as it does.  Walked over again
    and again while they came, they took a tenth of its start; and later each full collection
    would walk over them while readers wait.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
