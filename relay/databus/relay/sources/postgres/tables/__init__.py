"""The captured tables of a PostgreSQL server.

In reading order: ``postgres_types`` (types and their text form), ``postgres_tables`` (a table
and its schema), ``table_definitions`` (what an ALTER means for the rows that are there),
``publications`` (what a publication gives of each table), ``postgres_catalogue`` (SQL against
the server).
"""
