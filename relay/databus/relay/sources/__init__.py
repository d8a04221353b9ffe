"""The databases a relay reads; ``source`` is the contract that each module here keeps.

``catalogue`` finds the module for a URL, ``hosts`` the servers that a URL names.  ``mysql``,
``postgres``, ``sqlite`` (its log: ``sqlite_log``, written by ``sqlite_triggers``,
packed by ``sqlite_pack`` and ``sqlite_kernels``; its tables and their definitions:
``sqlite_tables``; its dumps: ``sqlite_chunks``; one relay a file: ``sqlite_claim``), ``relay``
(its parents: ``parent``) and
``generator`` (its loops: ``generator_kernels``) are the sources; ``ruled`` is put around one
whose database has rules for columns (``rule_stops``: the tables that these do not fit).  Shared:
``rows``, a chunk's rows as buffers; ``avro_kernels``, which writes Avro; ``configured_keys``, for
tables without a key; ``stops``, the tables that are passed over; ``told``, the definitions that
consumers know.
"""
