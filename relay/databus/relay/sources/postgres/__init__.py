"""The PostgreSQL source; see source.py."""

from __future__ import annotations

from databus.relay.sources.postgres.source import PostgresSource

__all__ = ["PostgresSource"]
