"""From PostgreSQL's rows to Avro.

In reading order: ``row_codec`` (text values to Avro), ``postgres_kernel_tables`` (the tables as
arrays for the kernels).
"""
