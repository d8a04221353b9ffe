"""A stream's position: GTIDs, binlog positions and histories.

In reading order: ``gtid_sets`` (MySQL's sets), ``binlog_positions`` and ``binlog_locations``
(which transactions are before a position of the binlog), ``mysql_lineage`` (which history was
read), ``promotion`` (from when another server's transactions count), ``foreign_gtids`` (what was
read of MariaDB's other domains), ``out_of_order_gtids`` (tagged and out-of-order GTIDs of MySQL)
and ``unordered_gtids`` (which of them were read).
"""
