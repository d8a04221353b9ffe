"""The slot's stream: decodes pgoutput messages into windows of frames.

In reading order: ``slot_stream`` (reads the slot), ``window_assembler`` (pure: messages to
windows), ``table_names`` (the table of each source), ``moved_files`` (whether a table's rows
changed without an event), ``postgres_lineage`` (which history was read), ``wal_retention`` (how
much log the server retains for the slot).
"""
