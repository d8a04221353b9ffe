"""One table read over HTTP into Arrow.

``table_reader`` reads a table's state or its changes, ``arrow_rows`` makes Arrow columns of
frames.

Imported by ``spark`` and ``exports``.  It imports ``pulling/transport``.
"""
