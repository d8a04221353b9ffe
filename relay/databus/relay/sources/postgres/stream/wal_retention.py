"""How much log the server retains for the slot, and when the relay warns about it.  Pure."""

from __future__ import annotations

from databus.relay.sources.postgres.protocol.postgres_settings import PostgresSettings
from databus.relay.sources.postgres.tables.postgres_catalogue import Slot


def warnings(slot: Slot, settings: PostgresSettings) -> list[str]:
    """Warnings before the disk is full or the slot is lost."""
    found = []
    kept, limit = slot.retained_bytes or 0, settings.retained_wal_warning_bytes
    if limit and kept > limit:
        found.append(
            f"slot {settings.slot} holds back {kept} bytes of log, more than "
            f"retained_wal_warning ({limit}): the relay does not keep up or cannot write, or a "
            "transaction is open for long"
        )
    if slot.wal_status in ("unreserved", "lost"):
        found.append(
            f"slot {settings.slot} is {slot.wal_status}: it passed max_slot_wal_keep_size, "
            "and the server gives up its log at the next checkpoint"
        )
    elif slot.safe_wal_bytes is not None and slot.safe_wal_bytes < kept:
        found.append(
            f"slot {settings.slot} may take {slot.safe_wal_bytes} more bytes of log before "
            f"max_slot_wal_keep_size is reached; it holds back {kept}"
        )
    return found
