"""Pulls frames from relays and bootstrap servers.

In reading order: ``pull_machine`` (pure: which server, from where, after what pause),
``discovery`` (pure: the relays of a cluster), ``transport`` (HTTP), ``puller`` (does what the
machine decides), ``replay_buffer`` (frames until a checkpoint covers them), ``raw_windows``
(windows as bytes).

Imported by ``delivery``, ``tables`` and ``client``.  It imports ``application``.
"""
