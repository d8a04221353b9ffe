"""Loops over bytes, compiled by numba if it is installed.

``kernels`` has the decorator and the loops that all rooms use, ``intrinsics`` two machine
instructions for it, ``xxh3`` the key hash, ``avro_row_kernels`` cuts Avro records into columns;
``kernel_cache`` compiles the kernels of all rooms at once.

Imported by every room.  It imports ``processes``.
"""
