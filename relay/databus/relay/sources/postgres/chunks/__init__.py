"""Chunks of PostgreSQL's tables, for dumps.

In reading order: ``postgres_chunks`` (the snapshot and the SELECT), ``chunk_session`` (receives
the rows).
"""
