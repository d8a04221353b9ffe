"""Values of MariaDB and MySQL, from the bytes of the binlog to Python.

In reading order: ``column_readers`` (a reader for each type), ``packed_decimals``,
``binary_json``, ``json_diffs`` (partial updates), ``charsets``, ``uncertain_table`` (the error
for a row whose meaning is not known).
"""
