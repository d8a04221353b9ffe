"""Relays that read each database once: one leads, others follow it.

In reading order: ``duties`` (pure: which relay leads and follows), ``cluster_nodes`` (who is there,
who leads) by ``zookeeper_nodes``, or by ``leased_nodes`` over a ``shared_document`` with a
``cluster_document`` (pure), which is an object on S3 or a ``document_row``; ``cluster_member`` (the
thread that renews the leases and decides on roles), ``lease_word`` (the end of a lease, shared with
a fetcher), ``database_role`` (pure: a fetcher's configuration), ``leadership`` and ``fetcher_term``
(the cluster as a fetcher sees it), ``routing_table`` (who serves what, for HTTP).

Imported by ``processes`` and ``http``.  Only ``zookeeper_nodes`` imports kazoo.
"""
