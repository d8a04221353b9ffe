"""`databus demo`: the whole system at work on a small shop, with a verdict at the end.

``demo`` is the course; ``processes`` starts the same commands that an operator runs, ``mirror`` is
the consumer, ``view`` the picture and ``verdict`` the comparison at the end.
"""
