"""The hot log, and its way into the runs.

In reading order: ``hot_log`` (LMDB: frames and checkpoint in one commit) with ``map_gate``,
``log_values`` and ``log_check``, ``log_blocks`` (blocks of frames, cut and checked), ``segments``
(seals a part of the log as a run), ``log_handover`` (the runs have what the log dropped),
``log_recording`` (the store's record of the log), ``log_adoption`` (a log that continues the runs
of another server), ``seeding`` (the first dump of each source),
``log_gaps`` (ranges that were lost), ``table_repairs`` (suspended tables compared and repaired),
``relay_api`` (the relay's JSON endpoints), ``configured_stores`` (which databases and stores there
are).

Imported by ``reading``, ``http`` and ``processes``.  It imports ``runs``.
"""
