"""The databases that a relay reads.

``contract`` defines a source; read it first.  Each source has a folder: ``mysql`` (MariaDB
and MySQL), ``postgres``, ``sqlite``, ``chained`` (another relay) and ``generator`` (no database).
They share: ``source_options`` (what ``options`` may hold), ``server_hosts`` (the servers that
a URL names), ``row_buffers`` (a chunk's rows as buffers), ``kernel_rows`` (arrays
of tables for a kernel), ``avro_kernels`` (writes Avro),
``configured_keys`` (keys for tables that have none), ``suspended_tables`` (tables that the stream
leaves out, with the reason), ``announced_schemas`` (the schemas that consumers have) and
``tls_contexts`` (TLS of connections to databases).

To add a source: a folder here that implements ``contract``, and a line in
``capture/source_catalogue``.

Imported by ``columns``, ``capture`` and ``dumps``.  A source imports ``databus.common`` and
this folder, and no other source.
"""
