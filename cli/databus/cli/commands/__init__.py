"""The commands of the command line, one module each.

A module has a command's arguments and help, and calls its implementation: ``relay_command``,
``bootstrap_command`` (and apply), ``check_command`` (check, doctor, status, resync),
``tail_command``, ``schema_command`` (show, save, check), ``sink_command``, ``dump_command``,
``init_command`` (init, token), ``verify_command``, ``runs_command``, ``export_command`` (export,
mirror), ``checkpoint_command``, ``deadletters_command``, ``inspect_command``, ``demo_command``.

Imported by ``main``.  A command imports the rooms when it runs, so that ``--help`` is quick.
"""
