"""The source for PostgreSQL: a logical replication slot, read with pgoutput.

In reading order:

* ``source`` puts the others together; ``settings`` and ``preflight`` are how it comes to a
  server, ``catalogue`` (with ``clear_guard``) asks it by SQL, ``publications`` is what a
  publication gives of each table, ``definitions`` how an altered table's old rows may have
  changed, ``schema`` is what a table looks like, ``encodings`` in which encoding texts come.
* ``lsn`` is how log positions become scns; ``lineage`` is which history has been read, and
  ``retention`` how much log the server keeps for us.
* Stream: ``replication`` (with ``auth``) is the connection, ``stream`` reads the slot,
  ``pgoutput`` has the messages, ``windows`` makes windows of them; ``values`` and ``rows`` turn
  text into Avro.
* The same compiled: ``kernels``, steered by ``layout``, with ``text_values``, and for values in
  binary ``binary_kernels``.  Where it stops, ``windows`` goes on; ``binary_values`` says which
  types are known in binary, and what their text is.
* Chunks: ``chunks`` decides, ``chunk_session`` receives, ``chunk_kernels`` packs.
"""

from __future__ import annotations

from databus.relay.sources.postgres.source import PostgresSource

__all__ = ["PostgresSource"]
