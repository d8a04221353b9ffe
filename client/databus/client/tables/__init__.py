"""Tables as Arrow columns.

``arrow_kernels`` cuts rows of frames into numbers and byte ranges, ``arrow_rows`` makes Arrow
columns of them, ``data_batch`` holds the rows of a consumer's batch, ``batch_limits``
finds where a batch of changes ends that has a limit, ``table_reader`` reads a table's state or its
changes over HTTP.

Imported by ``delivery``, ``spark`` and ``exports``.  It imports ``pulling/transport`` and
``application``.
"""
