"""The slot's stream: pgoutput messages to windows of frames.

In reading order: ``slot_stream`` (reads the slot), ``window_assembler`` (pure: messages to
windows), ``postgres_lineage`` (which history was read), ``wal_retention`` (how much log the
server keeps for the slot).
"""
