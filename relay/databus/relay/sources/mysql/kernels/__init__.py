"""The binlog's compiled hot path: packets to frames without an object per row.

In reading order: ``mysql_kernel_tables`` (the tables as numbers) and ``kernel_cells`` (their
columns), ``binlog_kernels`` (the loop), ``mysql_value_kernels``, ``mysql_frame_kernels`` and
``crc32_kernels``.
"""
