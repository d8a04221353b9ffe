"""Merges adjacent runs into larger ones, with Spark or in the applier's process.

In reading order: ``run_planner`` (pure: what to merge, and what a reader reads), ``bucket_tasks``
(pure: the buckets of a merge), ``bucket_runs`` (from tasks to a run), ``spark_tasks`` (does a task,
on Spark's workers or here), ``applier`` (merge after merge), ``process_merges`` and
``spark_merges`` (do the tasks of a merge), ``scratch_folders`` (disk of a merge).  The merge of one
bucket is the client's ``splits/bucket_merge``: readers of files do the same.

Imported by ``reading`` (the planner) and ``processes``.  It imports ``runs``.
"""
