"""Start and end of a process of ours.

``parent_process`` ends a child with its parent; ``loading`` imports modules without the garbage
collector; ``completion`` lets work end although its caller is cancelled; ``server_log`` is the log
on stderr; ``own_clock`` measures leases.

Imported by relay, bootstrap, client and cli.
"""
