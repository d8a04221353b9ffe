"""The relay's processes, and how they communicate.

In reading order: ``supervisor`` (the parent), ``child_process`` (the first code of a child),
``process_handover`` (what a child inherits), ``wakeup`` (a commit wakes the workers),
``supervised_child`` (a child as the parent sees it), ``worker_channel`` and ``reload`` (a changed
configuration), ``cluster_host`` (the supervisor as
``cluster`` sees it); ``fetcher`` (the process that writes
one database's folder) with ``source_link`` (its source) and ``fetcher_durability`` (syncs and
acknowledges), ``fetcher_process``, ``fetcher_status``, ``fetcher_api`` (unix socket).  The worker's
process is ``http/relay_server``.

Imported by ``serving``, ``http`` and ``local_relay``.  It imports ``cluster``, ``dumps``,
``capture`` and below.
"""
