"""The wire protocol of MariaDB and MySQL.

In reading order: ``mysql_settings`` (the configuration of one server), ``mysql_tls``,
``mysql_authentication``, ``mysql_connection`` (the only module that touches PyMySQL);
``packet_buffer`` (a stream cut into events), ``binlog_events`` (events that are not rows),
``transaction_payload`` (MySQL's compressed transactions), ``compressed_events`` (MariaDB's
compressed events).

It imports no other folder of ``mysql``.
"""
