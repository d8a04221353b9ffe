"""How bytes come from a PostgreSQL server.

In reading order: ``postgres_settings`` (the configuration of one server), ``scram``
(authentication), ``clear_guard`` (no password in clear), ``replication_connection``,
``pgoutput_messages``, ``lsn`` (log positions as scns), ``text_encodings``.
"""
