"""Serves the ring to readers.

In reading order: ``stream_request`` (a reader's request), ``stream_cursor`` (pure: the
serving rule and the cut of each block), ``stream_sender`` (one answer, from the ring to the
socket), ``debezium_lines`` (the form ``format=debezium``), ``send_batching``,
``content_coding``; ``database_view`` (a database as one worker sees
it), ``row_filter`` (``where`` applied to rows, with cached results), ``header_cache`` (headers
for filtered readers that are behind), ``shared_reads`` (one copy for all followers of a commit),
``extents``, ``socket_writer`` and ``send_threads`` (large parts sent without a copy).  Then the
folders ``filter`` (predicates) and ``counters``.

Imported by ``http``.  It imports ``ring``, ``columns``, ``dumps`` and ``processes`` (``wakeup``).
"""
