"""Tables as Arrow columns.

``arrow_kernels`` cuts rows of frames into numbers and byte ranges, ``arrow_rows`` makes Arrow
columns of them, ``data_batch`` holds the rows of a consumer's batch,
``row_shapes`` groups them by version and op, ``partial_updates`` combines
partial updates with their rows, ``batch_limits`` finds where a batch with a limit ends,
``table_reader`` reads a table's state or its changes over HTTP.

Imported by ``delivery``, ``splits``, ``spark`` and ``exports``.  It imports ``pulling/transport``
and ``application``.
"""
