"""A second opinion on what was captured: the binlog as python-mysql-replication reads it.

``library_reader`` reads transactions with the library, ``binlog_comparison`` puts them beside the
windows of a ring.  Nothing here runs in a server of ours.
"""
