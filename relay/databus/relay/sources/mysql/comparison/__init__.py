"""A second opinion on what was captured: the binlog as python-mysql-replication reads it.

``library_reader`` reads transactions with the library, ``binlog_comparison`` compares them with
the windows of a ring.  The relay's processes do not use this folder.
"""
