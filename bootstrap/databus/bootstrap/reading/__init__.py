"""Reads the store for a client.

In reading order: ``stored_database`` (a database as the server sees it), ``bootstrap_stream``
(snapshot and catch-up), ``row_group_pruning`` (row groups that a filter excludes),
``retained_runs`` (what a reader needs of replaced runs); ``frame_ranges``, ``key_spool``,
``net_changes`` and ``range_stream`` (changes and states between two positions), ``split_planner``
(the same as files that a reader opens itself); ``read_pool`` (the threads of readers),
``answer_sender`` and ``arrow_socket_writer`` (frames to the socket).

Imported by ``verify``, ``http`` and ``processes``.  It imports ``log``, ``runs`` and ``merging``.
"""
