"""The source for MariaDB and MySQL: row-format binlog with GTIDs, read as a replica reads it.

In reading order: ``mysql_source`` (the source), ``mysql_preflight`` (checks of the server's
settings); then the folders ``protocol`` (connections and binlog events), ``gtid`` (positions in
the binlog), ``rows`` (values), ``statements`` (what SQL in the binlog does), ``tables`` (captured
tables), ``binlog`` (events to windows), ``kernels`` (the same compiled) and ``chunks`` (dumps).
"""

from __future__ import annotations

from databus.relay.sources.mysql.mysql_source import MySqlSource

__all__ = ["MySqlSource"]
