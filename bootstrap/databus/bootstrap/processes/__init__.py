"""The processes of the bootstrap room.

``bootstrap_processes`` starts and stops them; ``log_writer`` is the consumer that appends to the
hot log, ``writer_processes`` runs several of them, ``log_restore`` makes a new log for stored runs.
The server is ``http/bootstrap_server``, the applier ``merging/applier``.

Imported by cli.
"""
