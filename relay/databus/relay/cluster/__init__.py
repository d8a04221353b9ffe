"""Relays that read each database once: one leads, others follow it.

In reading order: ``duties`` (pure: which relay leads and follows), ``zookeeper_nodes`` (who is
there, who leads), ``cluster_member`` (the thread that renews the leases and decides on roles),
``lease_word`` (the end of a lease, shared with a fetcher), ``database_role`` (pure: a fetcher's
configuration), ``leadership`` and ``fetcher_term`` (the cluster as a fetcher sees it),
``routing_table`` (who serves what, for HTTP).

Imported by ``processes`` and ``http``.  Only ``zookeeper_nodes`` imports kazoo.
"""
