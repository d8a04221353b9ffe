"""Tables kept as Parquet, Delta or Iceberg, for readers that have nothing of ours.

``export`` brings a table up to the stream; ``parquet``, ``delta`` and ``iceberg`` are the forms.
"""
