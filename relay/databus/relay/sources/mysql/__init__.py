"""The source for MariaDB and MySQL: row-format binlog with GTIDs, read as a replica reads it.

In reading order:

* ``source`` puts the others together; ``settings``, ``preflight``, ``connection``, ``sign_in`` and
  ``tls`` are how it comes to a server, ``tables``, ``charsets``, ``generated_columns`` and
  ``merge_tables`` what it learns there.
* ``numbering`` is all that tells MariaDB's GTIDs from MySQL's (``gtid_sets``, ``positions``,
  ``places``); ``lineage`` is which history has been read, ``turns`` which server's transactions
  count.
* Stream: ``packets`` cuts it into events, ``events`` reads those that are not rows, ``decoder``
  and ``mysql_decoder`` make windows of them, ``groups`` is the transaction that is open,
  ``xa`` and ``xa_groups`` are prepared transactions, ``rolled_back`` what a ROLLBACK leaves,
  ``placeless`` is what MySQL has under tags or late, ``payload`` and ``compressed`` what it and
  MariaDB compress, ``stops`` why a table is suspended.
* Statements: ``logged`` reads one from its event, ``statements`` says what it does to tables, with
  what ``reachable`` knows of views and triggers and ``cascades`` of foreign keys;
  ``changed_tables`` and ``widening`` say which captured tables hold something else behind it.
* Rows: ``known_tables`` is what the stream knows of its tables, ``mapped`` resolves a table map.
  Where the binlog names no columns, ``tracked`` is what is certain, for which ``scout`` looks
  ahead, as it does for what a statement has left.  ``columns``
  has a reader for each type, with ``decimals``, ``binary_json`` and ``json_diffs``.
* The same compiled: ``fast_path`` hands over to ``walk``, which ``plan`` and ``cells`` steer;
  ``values``, ``packing`` and ``checksum`` are its parts.  Where it stops, the decoder goes on.
* Chunks: ``chunks`` decides, ``chunk_rows`` receives, ``chunk_kernels`` packs.
"""

from __future__ import annotations

from databus.relay.sources.mysql.source import MySqlSource

__all__ = ["MySqlSource"]
