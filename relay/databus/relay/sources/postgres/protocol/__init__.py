"""The wire protocol of PostgreSQL.

In reading order: ``postgres_settings`` (the configuration of one server), ``scram``
(authentication), ``clear_guard`` (no password in clear text), ``replication_connection``,
``pgoutput_messages``, ``lsn`` (log positions as scns), ``text_encodings``.
"""
