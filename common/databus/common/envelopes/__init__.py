"""Envelopes: an event as the record that a consumer of another system expects.

In reading order: ``connect_types`` (the types of an envelope's fields), ``row_change`` (what goes
in and comes out), ``value_columns`` (the values of one record or of many), ``column_types`` with
``mysql_column_types`` and ``postgres_column_types`` (a column's type and value), ``row_types``
(rows and keys of a table), ``envelope_options``, ``debezium_envelope``, ``plain_envelopes`` (the
others), ``named_envelopes`` (all by name), ``json_encoding``, ``avro_encoding`` and
``protobuf_encoding`` (typed values as bytes), and ``frame_changes`` (frames as what goes in).

Everything here is pure: it reads no clock but the one that is given, and does no I/O.
Imported by relay and client.
"""
