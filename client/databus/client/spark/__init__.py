"""``spark.read`` and ``spark.readStream`` of the format ``databus``.

``data_source`` is the data source; ``register`` adds it to a Spark session.

"""

from __future__ import annotations

from databus.client.spark.data_source import register

__all__ = ["register"]
