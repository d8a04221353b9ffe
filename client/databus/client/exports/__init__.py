"""Tables kept as Parquet, Delta or Iceberg, for readers that have nothing of ours.

``export`` brings a table up to the stream; ``parquet`` (over ``versions``), ``delta`` and
``iceberg`` are the forms, and ``formats`` says which lies where: in a folder, or on S3.
"""
