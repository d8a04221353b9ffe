"""PostgreSQL's compiled hot path.

In reading order: ``pgoutput_kernels`` (messages to frames), ``text_value_kernels`` and
``binary_value_kernels`` (values to Avro), ``postgres_chunk_kernels`` (rows of chunks).
"""
