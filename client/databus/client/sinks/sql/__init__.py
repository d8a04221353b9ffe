"""Mirrors of the sources as tables of a database.

In reading order: ``sql_mirror`` (the sink: structure, rows and checkpoint in one transaction),
``net_rows`` (the last state of each key), ``table_structures`` (what to alter), ``sql_target``
(what a kind of database does), ``sqlite_target``, ``staged_target``,
``postgres_target``, ``duckdb_target``, ``mysql_target``.

Imported by ``sink_kinds``.  It imports ``sink``, ``sink_batch`` and ``checkpoints``.
"""
