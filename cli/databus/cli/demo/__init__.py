"""``databus demo``: the whole system on a small shop, and a comparison at the end.

In reading order: ``demo_run`` (what each run has), ``demo`` (the steps), ``demo_processes`` (starts
the commands that an operator runs), ``demo_consumer`` (the consumer), ``demo_view`` (the picture),
``demo_result`` (the comparison), ``cluster_demo`` (two relays, and leaders that end);
``demo_workload`` (the database and its changes), ``shop`` (tables and transactions),
``private_servers`` (MariaDB and PostgreSQL on free ports, for the demo and the tests),
``guardian`` (ends a child with its owner).
"""
