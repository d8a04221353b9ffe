"""Rows of PostgreSQL on their way to Avro.

In reading order: ``row_codec`` (text values to Avro), ``binary_values`` (types that are read in
binary form), ``postgres_kernel_tables`` (the tables that steer the kernels).
"""
