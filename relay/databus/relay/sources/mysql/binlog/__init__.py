"""Binlog events to windows of frames.

In reading order: ``binlog_decoder`` (the state machine) and ``mysql_decoder`` (what MySQL does
otherwise), ``open_group`` (the transaction that is being read), ``suspensions``,
``xa_transactions`` and ``xa_groups`` (prepared transactions), ``groups_without_scn`` (those of
other domains and servers, tagged and late ones), ``savepoints`` (what a ROLLBACK leaves),
``gtid_numbering`` (all that differs between MariaDB's and MySQL's GTIDs), ``ddl_lookahead``
(statements ahead of the stream), ``fast_path`` (hands blocks to the kernels).
"""
