"""The captured tables of a MariaDB or MySQL server.

In reading order: ``mysql_tables`` (as the catalogue has them), ``generated_columns`` and
``merge_tables`` (tables that need care), ``mapped_table`` (a table map resolved into a schema),
``known_tables`` (the stream's tables), ``inferred_columns`` (column names if the binlog has
none), ``changed_tables``, ``dropped_columns`` and ``type_widening`` (effects of an ALTER),
``cascades`` (foreign keys that change rows without binlog events) and ``passed_keys`` (those keys
after a statement of the stream).
"""
