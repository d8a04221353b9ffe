"""Start and end of a process of ours.

``parent_process`` ends a child with its parent; ``loading`` imports modules without the garbage
collector; ``completion`` lets work end although its caller is cancelled.

Imported by relay, bootstrap and cli.
"""
