"""Tables maintained as Parquet, Delta or Iceberg, for readers without Databus.

In reading order: ``table_export`` (brings a table up to the stream), ``parquet_table`` (over
``parquet_versions``), ``delta_table`` and ``iceberg_table`` (the formats), ``export_formats``
(the location of each table: a folder, or S3).
"""
