"""The ring: the bounded log of frames on disk, and the folder of a database around it.

In reading order: FORMAT.md and ``ring_format`` (layout of the files), ``ring_file`` (the file,
mapped), ``ring_writer`` (append, evict, sync), ``ring_reader`` (reads without locks), ``scn_index``
(skip list over the ring), ``ring`` (all of it as one object), ``ring_kernels`` (its loops),
``expiry`` (retention by time), ``ring_recovery`` (after a crash),
``ring_check`` (the invariants, checked from outside).  Beside it in the folder: ``data_folder``
(the paths), ``folder_locks`` (locks of writers), ``schema_registry`` (every schema version) with
``returning_columns`` (columns that were dropped and are there again).

Imported by the rest of the relay.  It imports ``databus.common`` alone.
"""
