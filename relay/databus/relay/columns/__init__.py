"""Rules for columns: which columns leave the relay, and in which form.

In reading order: ``column_rules`` (the rules, pure), ``column_rewriting`` (frames and chunks
rewritten by the rules) with ``column_kernels`` and ``record_edits``;
``ruled_source`` (a source with rules applied), ``rule_suspensions`` (tables that a rule does not
fit), ``large_rows`` (rows larger than the ring accepts), ``projection`` (``columns=`` of a
reader), ``key_encryption`` (keys in a dump's record and in answers).

Imported by ``capture``, ``serving``, ``http`` and ``processes``.  It imports ``sources`` and
``ring``.
"""
