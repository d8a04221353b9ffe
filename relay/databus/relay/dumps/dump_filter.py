"""A dump's ``where``: selects the matching rows of a chunk here, not in the database.

The text of a request never reaches the server as SQL.  The condition sees a row as consumers see
it, after the rules for columns, so that it shows nothing of an excluded column or another table.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from databus.common.errors import BadFilter
from databus.common.filters.predicate import compile_predicate, parse_where
from databus.relay.sources.contract import Chunk
from databus.relay.sources.row_buffers import Rows


def filtered(chunk: Chunk, where: str) -> Chunk:
    """The chunk with only those rows for which ``where`` is true.

    Its ``last_key`` and ``done`` stay: the next chunk begins after all rows that were read.

    Raises:
        BadFilter: it is no predicate, or not over this table's columns.
    """
    schema, rows = chunk.schema, chunk.rows
    try:
        test = compile_predicate(parse_where(where), schema.columns)
    except BadFilter as error:
        raise BadFilter(f"{schema.source}: {error.message}") from None
    is_match = [test(schema.decode_row(row.row)) is True for row in rows]
    if all(is_match):
        return chunk
    spans = rows.spans[np.array(is_match, dtype=np.bool_)]
    return dataclasses.replace(chunk, rows=Rows.at(rows.data, spans))
