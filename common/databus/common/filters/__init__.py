"""Filters over headers of frames (sources, operations, partitions) and over the values of a row.

In reading order: ``stream_filter`` (which frames a reader requests), ``frame_selection`` (cuts
these frames out of a block); ``predicate`` (``where``: parsed, compiled to closures),
``predicate_values`` (kinds, literals, comparisons), ``row_rule`` (the images of a change to which a
predicate is applied).  To add a filter over headers: ``stream_filter``, then its parameter in
``http/request_parameters``.  The relay's kernel for predicates is in its ``serving/filter``.

Imported by every room.
"""
