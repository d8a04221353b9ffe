"""Changes as files in a folder or a bucket, with marks of what is complete.

In reading order: ``file_sink`` (the sink: layout, commit, resolved marks), ``file_formats``
(NDJSON, Avro, Parquet), ``file_store`` (a local folder, or what pyarrow reaches).

Imported by ``sink_kinds``.  It imports ``sink`` and ``sink_batch``.
"""
