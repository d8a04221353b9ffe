"""From a source's batches into the ring.

In reading order: ``source_catalogue`` (which source serves a URL), ``intake`` (drops known
frames, appends the rest, resumes), ``leader_term`` (pure: windows of our own in a cluster),
``announced_definitions`` (definitions that the source has not announced), ``commit_coalescing``
(the delay that gathers small commits), ``recent_batches`` (what was streamed in the last moment),
``reader_release`` (block mode).

Imported by ``dumps`` and ``processes``.  It imports ``sources``, ``columns`` and ``ring``.
"""
