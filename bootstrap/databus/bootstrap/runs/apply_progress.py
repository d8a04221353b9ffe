"""What an applier is doing now, for the terminal and as a note in the store for the server.

The manifest has the records of finished merges; this is about the running one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from databus.bootstrap.runs.run_storage import Storage
from databus.common.errors import StoreError

_LOG = logging.getLogger("databus.bootstrap.merging.applier")

NOTE = "applier.json"
EVERY_S = 2.0
STALE_S = 30.0

Tasks = Callable[[], tuple[int, int]]


class ApplyProgress:
    """Writes the note of one store's applier.

    Invariants:
        I1. The note is written when a merge begins, while it lasts, and when it has ended in
            any way; a failure to write it never disturbs the merge.

    Owner: the applier; a thread of its own polls the tasks.
    """

    def __init__(self, name: str, storage: Storage, every_s: float = EVERY_S) -> None:
        self._name = name
        self._storage = storage
        self._every_s = every_s

    @contextlib.contextmanager
    def merging(self, what: Mapping[str, Any], tasks: Tasks) -> Iterator[None]:
        """A merge runs within the block; ``tasks`` gives the finished tasks and all tasks."""
        document = {"state": "merging", "began_us": _now_us(), **what}
        _LOG.info(
            "%s: merging %s runs of %s rows into a %s",
            self._name,
            what["runs"],
            f"{what['rows_in']:,}",
            what["kind"],
        )
        self._write(document)
        ended = threading.Event()
        follower = threading.Thread(
            target=self._follow, args=(document, tasks, ended), name="apply progress", daemon=True
        )
        follower.start()
        try:
            yield
        except Exception as error:
            document = {"state": "failed", "error": str(error)[:500]}
            raise
        else:
            document = {"state": "idle"}
        finally:
            ended.set()
            follower.join()
            self._write(document)

    def _follow(self, document: Mapping[str, Any], tasks: Tasks, ended: threading.Event) -> None:
        reported = (0, 0)
        while not ended.wait(self._every_s):
            done, total = tasks()
            if (done, total) != reported:
                reported = (done, total)
                _LOG.info("%s: %d of %d tasks", self._name, done, total)
            self._write({**document, "tasks_done": done, "tasks": total})

    def _write(self, document: Mapping[str, Any]) -> None:
        content = json.dumps({**document, "at_us": _now_us()}).encode()
        with contextlib.suppress(StoreError):
            self._storage.write_note(NOTE, content)


def applier_document(storage: Storage) -> dict[str, Any]:
    """The applier's last note; the state is ``down`` if it stopped renewing the note in a merge."""
    content = storage.read_note(NOTE)
    if content is None:
        return {"state": "unknown"}
    try:
        document = json.loads(content)
        silent_s = time.time() - document["at_us"] / 1e6
    except (ValueError, KeyError, TypeError):
        return {"state": "unknown"}
    if document.get("state") == "merging" and silent_s > STALE_S:
        document["state"] = "down"
    return dict(document)


def _now_us() -> int:
    return time.time_ns() // 1000
