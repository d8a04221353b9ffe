"""The counters of the HTTP workers.

In reading order: ``counter_file`` (numbers that one worker writes and all can read),
``worker_counters`` (by database), ``client_counters`` (by client).

Imported by ``serving`` and ``http``.
"""
