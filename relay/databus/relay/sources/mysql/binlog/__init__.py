"""Binlog events to windows of frames.

In reading order: ``binlog_decoder`` (the state machine) and ``mysql_decoder`` (where MySQL
differs), ``event_cursor`` (the position in the files), ``group_progress`` (the transactions so
far), ``open_group`` (the transaction that is being read), ``suspensions``, ``xa_transactions``
and ``xa_groups`` (prepared transactions), ``groups_without_scn`` (of other domains and servers,
with tagged or out-of-order GTIDs), ``savepoints`` (what a ROLLBACK leaves), ``gtid_numbering``
(differences between MariaDB's and MySQL's GTIDs), ``lookahead_request`` and ``ddl_lookahead``
(statements ahead of the stream), ``fast_path`` (hands blocks to the kernels).
"""
