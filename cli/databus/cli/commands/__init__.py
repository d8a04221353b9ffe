"""The commands of the command line, a module each.

A module has a command's arguments, its help and the call of what it does: ``relay_command``,
``bootstrap_command``, ``apply_command``, ``check_command``, ``tail_command``, ``dump_command``,
``resync_command``, ``status_command`` (``command_list`` adds these to the command line),
``init_command``, ``verify_command``, ``runs_command``, ``export_command``, ``inspect_command``,
``demo_command``.

Imported by ``main``.  It imports the rooms when a command runs, so that ``--help`` is quick.
"""
