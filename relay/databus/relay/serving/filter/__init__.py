"""``where=``: a SQL predicate over one row.

In reading order: ``predicate`` (parsed, compiled to closures), ``predicate_values`` (kinds,
literals, comparisons), ``predicate_program`` (the same as a program for a kernel),
``predicate_kernels`` and ``text_kernels`` (the kernels).  ``row_filter`` in the folder above
applies it to a stream.

Imported by ``serving`` and ``dumps``.  It imports ``databus.common`` alone.
"""
