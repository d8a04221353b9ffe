"""``where=`` at the rate of the ring: a predicate of common's ``filters`` as a kernel runs it.

In reading order: ``predicate_program`` (the predicate as a program for a kernel),
``predicate_kernels`` and ``text_kernels`` (the kernels).  ``row_filter`` in the folder above
applies it to a stream.

Imported by ``serving`` and ``dumps``.  It imports ``databus.common`` alone.
"""
