"""Tables kept as Parquet, Delta or Iceberg, for readers that have nothing of ours.

In reading order: ``table_export`` (brings a table up to the stream), ``parquet_table`` (over
``parquet_versions``), ``delta_table`` and ``iceberg_table`` (the formats), ``export_formats``
(which table is where: in a folder, or on S3).
"""
