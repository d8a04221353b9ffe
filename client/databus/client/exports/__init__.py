"""Tables kept as Parquet, Delta or Iceberg, for readers that have nothing of ours."""
