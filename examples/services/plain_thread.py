"""A client in a thread of a program that has no event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from databus.client import DatabusClient


@contextmanager
def running(client: DatabusClient) -> Iterator[threading.Thread]:
    """The client runs in a thread within the block, and ends with a last checkpoint."""
    thread = threading.Thread(target=client.run, name="databus-client")
    thread.start()
    try:
        yield thread
    finally:
        client.stop()
        thread.join()
