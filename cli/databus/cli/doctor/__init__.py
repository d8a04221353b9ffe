"""``databus doctor``: what is wrong, or will be, and what to do about it.

In reading order: ``symptoms`` (one finding), ``server_symptoms`` (pure: in the status of relays and
bootstrap servers), ``machine_symptoms`` (on this machine: disks, folders, descriptors, Java),
``examination`` (asks, collects and prints).

Imported by ``commands``.  It imports ``console``.
"""
