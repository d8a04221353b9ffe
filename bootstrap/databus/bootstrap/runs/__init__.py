"""Runs: immutable Parquet files that cover a range of the stream.

In reading order: FORMAT.md is the store's specification; ``parquet_runs`` (a run and its
files), ``open_run`` (reads one), ``unfinished_merge`` (what some applies have made of the next
one), ``run_ids``, ``file_lists`` (the files of large runs), ``manifest`` (which runs exist),
``store_summary`` (the same for terminals), ``run_storage`` (a store in a
folder), ``s3_storage`` (a store on S3), ``open_readers`` (what readers retain), ``read_leases``
(the same for readers that open files themselves), ``apply_progress`` (the note of a running merge),
``log_record`` (what a log knows beside its frames), ``failpoints`` (for crash tests).

Imported by the other folders of the room.  It imports the client's ``splits`` (columns) alone.
"""
