"""Rows of PostgreSQL on their way to Avro.

In reading order: ``row_codec`` (text values to Avro), ``postgres_kernel_tables`` (the tables that
steer the kernels).
"""
