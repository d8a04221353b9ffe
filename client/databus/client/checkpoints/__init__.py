"""Where checkpoints are stored.

In reading order: ``checkpoint_stores`` (a file, LMDB, an application's own code, none),
``checkpoint_table`` (pure: the table in an application's database, its statements),
``database_steps`` (statements by a driver of the DB-API or by asyncpg), ``database_checkpoints``
(that table, by them).

Imported by ``delivery``, ``groups`` and ``client``.
"""
