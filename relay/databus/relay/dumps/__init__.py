"""Dumps by watermarks (DBLog), and the resynchronisation of suspended tables.

In reading order: ``dump_records`` (the requests, and their file), ``dump_runner`` (the
queue), ``table_dump`` (the in-flight chunks of one table), ``chunk_window`` (pure: which rows of
a chunk may still go out), ``watermark_writes`` (watermarks as rows of a table), ``dump_packing``
(rows to frames), ``dump_filter`` (a dump's ``where``), ``dump_progress``; ``table_records``,
``resync_pace`` and ``resync`` (tables that are not followed), ``resync_requests`` and
``chunk_reads`` (the HTTP requests about them).

Imported by ``processes``, ``serving`` and ``http``.  It imports ``capture`` and ``sources``.
"""
