"""NATS: changes as messages of a JetStream stream, in commit order and without a gap.

In reading order: ``nats_library`` (the driver and its errors), ``nats_subjects``,
``stream_writer`` (messages that the server takes in order or not at all), ``nats_checkpoints`` (the
key-value bucket), ``nats_sink``.

Imported by ``sink_kinds``.  The driver is in the extra ``sink-nats``.
"""
