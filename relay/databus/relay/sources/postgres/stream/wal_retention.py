"""How much WAL the server retains for the slot, and when the relay warns about it.  Pure."""

from __future__ import annotations

from typing import Any

from databus.relay.sources.postgres.protocol.postgres_settings import PostgresSettings
from databus.relay.sources.postgres.tables.postgres_catalogue import Slot


def document(slot: Slot) -> dict[str, Any]:
    """The slot's part of the status."""
    return {
        "retained_bytes": slot.retained_bytes,
        "wal_status": slot.wal_status,
        "safe_wal_bytes": slot.safe_wal_bytes,
        "slot_active_pid": slot.active_pid,
    }


def warnings(slot: Slot, settings: PostgresSettings) -> list[str]:
    """Warnings before the disk is full or the slot is lost."""
    found = []
    retained, limit = slot.retained_bytes or 0, settings.retained_wal_warning_bytes
    if limit and retained > limit:
        found.append(
            f"slot {settings.slot} retains {retained} bytes of WAL, more than retained_wal_warning "
            f"({limit}): the relay lags behind or cannot write, or a transaction is open for long"
        )
    if slot.wal_status in ("unreserved", "lost"):
        found.append(
            f"slot {settings.slot} is {slot.wal_status}: it passed max_slot_wal_keep_size, "
            "and the server removes its WAL at the next checkpoint"
        )
    elif slot.safe_wal_bytes is not None and slot.safe_wal_bytes < retained:
        found.append(
            f"slot {settings.slot} can retain {slot.safe_wal_bytes} more bytes of WAL before "
            f"max_slot_wal_keep_size is reached; it retains {retained}"
        )
    return found
