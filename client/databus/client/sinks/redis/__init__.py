"""Redis: changes as entries of streams, or the rows themselves as hashes.

In reading order: ``redis_library`` (the driver and its errors), ``redis_scripts`` (what the server
runs), ``redis_rows`` (rows as keys and fields), ``redis_targets`` (what it must not write),
``redis_transaction`` (one MULTI, from the check of the checkpoint to EXEC), ``redis_sink``.

Imported by ``sink_kinds``.  The driver is in the extra ``sink-redis``.
"""
