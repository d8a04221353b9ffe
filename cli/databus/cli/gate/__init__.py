"""What a migration would break, before it runs: ``databus schema check``.

In reading order: ``migration_files`` cuts a file into statements; ``table_draft`` is a table while
a statement changes it, and ``table_effects`` what a statement does to one; ``mysql_migration`` and
``postgres_migration`` read the statements of a server, with ``mysql_columns`` and
``postgres_columns``; ``reader_resolution`` compares two versions as Avro readers do;
``gate_findings`` are the results; ``sink_effects`` finds the routes and registry subjects that
break, ``model_checks`` the classes; ``schema_gate`` is the whole, ``gate_report`` prints it.

The relay's own rules decide what the relay does with a statement: this folder only computes the
definition after it.
"""
