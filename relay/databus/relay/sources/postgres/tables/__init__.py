"""The captured tables of a PostgreSQL server.

In reading order: ``postgres_types`` (types and their text form), ``postgres_tables`` (a table
and its schema), ``table_definitions`` (the effects of an ALTER on existing rows),
``publications`` (what a publication publishes of each table), ``postgres_catalogue`` (SQL against
the server), ``open_writers`` (the transactions for which dumps of suspended tables wait).
"""
