"""Kafka: changes as records of an envelope, in the transactions of one producer.

In reading order: ``kafka_library`` (the driver and its errors), ``kafka_checkpoints`` (the topic
of the checkpoints), ``registry_client``, ``kafka_sink``.

Imported by ``sink_kinds``.  The driver is in the extra ``kafka``.
"""
