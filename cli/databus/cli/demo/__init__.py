"""``databus demo``: the whole system on a small shop, and a comparison at the end.

In reading order: ``demo`` (its steps), ``demo_processes`` (starts the commands that an operator
runs), ``demo_consumer`` (the consumer), ``demo_view`` (the picture), ``demo_result`` (the
comparison); ``shop`` (tables and workload), ``private_servers`` (MariaDB and PostgreSQL on free
ports, for the demo and the tests), ``guardian`` (ends a child with its owner).
"""
