"""The source for PostgreSQL: a logical replication slot, read with pgoutput.

In reading order: ``postgres_source`` (the source), ``postgres_preflight`` (what must be right on
the server); then the folders ``protocol`` (connections and messages), ``tables`` (the
catalogue), ``rows`` (values), ``stream`` (messages to windows), ``kernels`` (the same compiled)
and ``chunks`` (dumps).
"""

from __future__ import annotations

from databus.relay.sources.postgres.postgres_source import PostgresSource

__all__ = ["PostgresSource"]
