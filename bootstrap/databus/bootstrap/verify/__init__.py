"""Compares a table of the source with its copy, and repairs the rows that differ.

In reading order: ``table_verifier`` (the comparison while both change), ``table_comparison``
(pure: digests of rows), ``table_copy`` (the copy, over HTTP or in this process),
``table_claims`` (a claim on a suspended table).

Imported by ``processes`` and cli.  It imports ``reading``.
"""
