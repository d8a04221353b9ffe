"""Tables maintained as Parquet, Delta or Iceberg, for readers without Databus.

In reading order: ``table_export`` (brings a table up to the stream), ``parquet_table`` (over
``parquet_versions``), ``delta_table`` and ``iceberg_table`` (the formats), ``export_formats``
(the location of each table: a folder, or S3).
Mirrors replace single files: ``lake_files`` (what a file is; tasks read and write them),
``delta_files`` and ``iceberg_files`` (files and position in one commit).
"""
