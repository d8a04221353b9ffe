"""The implementation of the commands on a terminal.

In reading order: ``command_options`` (the configuration file, durations), ``command_group``
(the help), ``serving_log`` (the log of the commands that serve), ``http_client`` (one JSON call to
a server); ``preflight_report`` (check), ``tail_output`` (tail), ``dump_status`` (dump),
``server_status`` (status, resync), ``stored_checkpoints`` (checkpoint, and the databases of
deadletters).

Imported by ``commands`` and ``demo``.
"""
