"""The frame: the bytes of one event, the same from the fetcher to the consumer.

In reading order: FORMAT.md is the specification; ``header_layout`` has the table of header
fields, and all code that depends on their offsets: the writers of headers, compiled and not, and
the readers; ``frame_format`` packs frames, reads them and cuts streams into them;
``window_builder`` builds the frames of one transaction and its end; ``spans`` marks the parts of
an HTTP body that were sent without a copy.

To change the header: FORMAT.md, ``header_layout``, and the golden files in tests/golden.

Imported by every room.
"""
