"""Filters that are applied to headers of frames: sources, operations, partitions.

In reading order: ``stream_filter`` (which frames a reader requests), ``frame_selection`` (cuts
these frames out of a block).  To add a filter of this kind: ``stream_filter``, then its
parameter in ``http/request_parameters``.  Filters over the values of a row are in the relay, in
``serving/filter``.

Imported by every room.
"""
