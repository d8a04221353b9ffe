"""Chunks of MariaDB's and MySQL's tables, for dumps.

In reading order: ``mysql_chunks`` (the snapshot and the SELECT), ``mysql_chunk_rows`` (receives
the rows), ``mysql_chunk_kernels`` (packs them), ``shown_commits`` (waits for the engine).
"""
