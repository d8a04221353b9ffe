"""Groups: the partitions of one stream, shared among the members that are there.

In reading order: ``assignment`` (pure: which member gets which partition), ``resizing`` (pure:
another number of partitions), ``group_table`` (pure: the tables of groups, their statements),
``group_leases`` (those tables, by a driver), ``owned_partition`` (a partition with its fencing
number, lease and checkpoint), ``partition_letters`` (its dead letters), ``membership`` (the thread
that renews the lease), ``group_client`` (one client for each partition that the member owns).

Applications import it.  It imports ``client``, ``checkpoints``, ``deadletters`` and
``application``.
"""
