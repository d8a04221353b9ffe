"""Files of a bootstrap's store, which a reader merges by itself.

In reading order: ``frame_tables`` (the columns of the files), ``bucket_merge`` (pure: the merge of
one bucket), ``partial_rows`` (pure: PARTIAL frames into their rows), ``clustered_files`` (reads a
file), ``split_plan`` (pure: what a server lists), ``split_planning`` (requests it, and the changes
after the files), ``split_reader`` (the rows of one split).

Imported by ``spark``, and by the bootstrap's server and merges.  It imports ``tables``.
"""
