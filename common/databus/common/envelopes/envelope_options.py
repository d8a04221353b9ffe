"""What an envelope needs of its stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from databus.common.envelopes.column_types import ValueModes
from databus.common.envelopes.row_types import Product


@dataclass(frozen=True, kw_only=True)
class EnvelopeOptions:
    """``database`` is the stream's name, and ``prefix`` what topics begin with (Debezium's
    topic.prefix).

    ``catalogue`` is the name of PostgreSQL's database, if it is another one.  ``tombstones``: a
    record without a value follows each delete.  ``transactions``: records of the beginning and
    the end of each transaction (Debezium's provide.transaction.metadata).
    """

    database: str
    prefix: str
    product: Product
    catalogue: str = ""
    modes: ValueModes = field(default_factory=ValueModes)
    tombstones: bool = True
    transactions: bool = False
