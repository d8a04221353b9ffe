"""Start and end of a process of ours.

``parent_process`` ends a child with its parent; ``loading`` imports modules without the garbage
collector.

Imported by relay, bootstrap and cli.
"""
