"""The frame: the bytes of one event, the same from the fetcher to the consumer.

In reading order: FORMAT.md is the specification; ``frame_format`` has the table of header
fields, packs frames and reads them; ``window_builder`` builds the frames of one transaction and
its end; ``spans`` marks the parts of an HTTP body that were sent without a copy.

To change the header: FORMAT.md and ``frame_format``; in the relay the kernels that pack frames
(``mysql_frame_kernels``, ``pgoutput_kernels``, ``sqlite_kernels``, ``generator_kernels``,
``dump_packing``, ``column_kernels``) and those that read them in place (``header_kernels``,
``ring_kernels``, ``predicate_kernels``); the golden files in tests/golden.

Imported by every room.
"""
