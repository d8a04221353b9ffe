"""The slot's stream: pgoutput messages to windows of frames.

In reading order: ``slot_stream`` (reads the slot), ``window_assembler`` (pure: messages to
windows), ``table_names`` (which table each source is), ``moved_files`` (whether a table's rows
changed without an event), ``postgres_lineage`` (which history was read), ``wal_retention`` (how
much log the server keeps for the slot).
"""
