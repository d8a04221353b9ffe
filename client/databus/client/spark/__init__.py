"""``spark.read`` and ``spark.readStream`` of the format ``databus``.

In reading order: ``data_source`` (what Spark calls; ``register`` adds it to a session),
``read_options``, ``pushed_filters`` (a query's filters as the servers'), ``table_tasks`` (the work
of a task), ``micro_batches`` (``readStream``, its offsets and limits); then ``databus mirror``:
``table_merge`` (Spark's work on the files of one table), ``lake_mirror`` (one table to a position),
``mirror_passes`` (all tables of a database).

Imported by applications and the command line.  It imports ``tables`` and ``exports``.
"""

from __future__ import annotations

from databus.client.spark.data_source import register

__all__ = ["register"]
