"""Calls the consumer.

In reading order: ``window_pieces`` (pure: whole windows over blocks), ``dispatcher`` (pure: which
callback is due), ``callback_results`` (one call, its result and budget), ``steering`` (pause,
resume, seek and stop), ``batch_gathering`` (waits for the rows of a batch), ``consumer_calls``
(calls the consumer, with retries), ``key_workers`` (parallel calls, a key always on the same
worker), ``dead_letter_replay`` (calls it with dead letters again), ``window_reader`` (windows out
of the buffer), ``loop_thread`` (an event loop for callers without one), ``pulled_windows`` (the
iterators over them).

Imported by ``client``.  It imports ``pulling``, ``checkpoints``, ``deadletters`` and
``application``.
"""
