"""The stream of the replication slot: decodes pgoutput messages into windows of frames.

In reading order: ``slot_stream`` (reads the slot), ``window_assembler`` (pure: messages to
windows), ``table_names`` (the table of each source), ``moved_files`` (whether a table's rows
changed without an event), ``postgres_lineage`` (timelines, and gaps of the slot),
``wal_retention`` (how much WAL the server retains for the slot).
"""
