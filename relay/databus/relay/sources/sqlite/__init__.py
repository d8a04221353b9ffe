"""SQLite as a source: triggers write a change log, and the source polls it.

In reading order: ``sqlite_source`` (one poll, one window), ``sqlite_log`` (the log's tables),
``sqlite_triggers`` (their text), ``sqlite_tables`` (captured tables and their definitions),
``sqlite_definitions`` (what a status shows of them), ``sqlite_replacements`` (rows that REPLACE
removes), ``sqlite_packing`` and ``sqlite_kernels`` (log rows to frames), ``sqlite_chunks`` (dumps),
``sqlite_claim`` (one relay for each file).
"""
