"""Schemas of tables, and the values of their columns.

In reading order: ``source_schema`` (columns, Avro, the codec of rows), ``rabin_fingerprint``
(their fingerprints), ``column_values`` (values on their way to Avro and JSON), ``postgres_arrays``
(arrays in their text form), ``source_names`` (``schema.table``, made and split).

Imported by every room.
"""
