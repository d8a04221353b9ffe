"""A consumer that gives each change to a Celery task.

A checkpoint is stored when the broker has every task before it, so each change is sent at least
once, and a task may run twice: it is idempotent by its position.
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from databus.client import Consumer, Event

app = Celery("shop")
applied: dict[str, Any] = {}


def apply_change(position: str, source: str, op: str, key: dict[str, Any]) -> None:
    """Apply one change; a second delivery changes nothing."""
    applied.setdefault(position, (source, op, key))


apply_change_task = app.task(apply_change)


class SendTasks(Consumer):
    """Sends a task for each event; an error of the broker is an error of the callback."""

    def onDataEvent(self, event: Event) -> None:
        apply_change_task.delay(str(event.position), event.source, event.op, event.key)
