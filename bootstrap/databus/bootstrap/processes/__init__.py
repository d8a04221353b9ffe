"""The processes of the bootstrap room.

``bootstrap_processes`` starts and stops them; ``log_writer`` is the consumer that appends to the
hot log, with the leases of ``writer_leases``.  ``shared_log`` is one of several over one store.
``log_writers`` has one for each database, ``writer_processes`` several processes of them, and
``log_restore`` makes a new log for stored runs.
The server is ``http/bootstrap_server``, the applier ``merging/applier``.

Imported by cli.
"""
