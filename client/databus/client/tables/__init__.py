"""Reads one table over HTTP into Arrow.

``table_reader`` reads a table's state or its changes, ``arrow_rows`` converts frames to Arrow
columns.

Imported by ``spark`` and ``exports``.  It imports ``pulling/transport``.
"""
