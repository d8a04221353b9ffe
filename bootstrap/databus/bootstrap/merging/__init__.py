"""Merges adjacent runs into larger ones, with Spark.

In reading order: ``run_planner`` (pure: what to merge, and what a reader reads), ``applier``
(the only module that imports pyspark), ``spark_tasks`` (runs on Spark's workers),
``memory_budget`` and ``scratch_folders`` (memory and disk of a merge).

Imported by ``reading`` (the planner) and ``processes``.  It imports ``runs``.
"""
