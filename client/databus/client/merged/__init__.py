"""Several streams as one, in the order of commit time.

In reading order: ``merge_order`` decides which window is next, and is pure; ``merged_stream`` is
one of the streams; ``stream_merger`` takes windows out of all of them; ``merged_windows`` has the
windows and iterators of the application, ``merged_delivery`` the calls of a consumer;
``merged_client`` is the whole.
"""
