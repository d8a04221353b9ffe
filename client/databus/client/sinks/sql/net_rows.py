"""The last state of each key in a batch: what has to be written, each key once.

Pure: Arrow in, Arrow out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from databus.client.sinks.sink_batch import SinkTable
from databus.common.checkpoint import Position

POSITION = ("_scn", "_seq")
"""The columns of the target that hold the position of a row's last change."""

_INSERTED = pa.array(["c", "r"])


@dataclass(slots=True)
class NetRows:
    """What changes in a target; no key is in two of its parts.

    ``truncated`` comes first: every row that is not newer is removed.
    """

    upserts: Any = None
    """Whole rows, with their position; None for none."""
    are_inserts: bool = False
    """Whether each of them was inserted, or read by a dump."""
    deletes: Any = None
    """Keys, with their position; None for none."""
    updates: list[tuple[tuple[str, ...], Any]] = field(default_factory=list)
    """Rows without some columns: the columns that they have besides the key, and the rows."""
    truncated: Position | None = None


def net_rows(table: SinkTable) -> Iterator[NetRows]:
    """The changes of a table: one part, and a further one after each truncate."""
    truncates = pc.indices_nonzero(pc.equal(table.arrow["_op"], "t")).to_pylist()
    begin, truncated = 0, None
    for at in [*truncates, table.arrow.num_rows]:
        piece = table.arrow.slice(begin, at - begin)
        if piece.num_rows or truncated is not None:
            net = _net_of(piece, table.schema.key) if piece.num_rows else NetRows()
            net.truncated = truncated
            yield net
        if at < table.arrow.num_rows:
            truncated = Position(table.arrow["_scn"][at].as_py(), table.arrow["_seq"][at].as_py())
        begin = at + 1


def _net_of(piece: Any, key: tuple[str, ...]) -> NetRows:
    if piece["_absent"].null_count < piece.num_rows:
        return _folded(piece, key)
    last = _last_of_each_key(piece, key)
    if last is not None:
        piece = piece.take(last)
    is_delete = pc.equal(piece["_op"], "d")
    names = _columns(piece)
    deletes = piece.filter(is_delete).select([*key, *POSITION])
    upserts = piece.filter(pc.invert(is_delete)) if deletes.num_rows else piece
    inserted = pc.is_in(upserts["_op"], _INSERTED)
    return NetRows(
        upserts.select(names) if upserts.num_rows else None,
        pc.all(inserted).as_py() is True,
        deletes if deletes.num_rows else None,
    )


def _columns(piece: Any) -> list[str]:
    """The columns of the row, and those of its position."""
    return [*piece.schema.names[: -len(("_op", *POSITION, "_commit_time", "_absent"))], *POSITION]


def _last_of_each_key(piece: Any, key: tuple[str, ...]) -> Any:
    """The indices of the last row of each key, in order; None if every key is there once."""
    numbered = pa.table([*(piece[name] for name in key), pa.array(range(piece.num_rows))],
                        names=[*(f"k{at}" for at in range(len(key))), "i"])  # fmt: skip
    grouped = numbered.group_by([f"k{at}" for at in range(len(key))]).aggregate([("i", "max")])
    if grouped.num_rows == piece.num_rows:
        return None
    last = grouped["i_max"].combine_chunks()
    return last.take(pc.array_sort_indices(last))


@dataclass(slots=True)
class _State:
    row: dict[str, Any]
    absent: frozenset[str]


def _folded(piece: Any, key: tuple[str, ...]) -> NetRows:
    """The same, row by row, for rows that lack columns: they are laid over those before them."""
    states: dict[tuple[Any, ...], _State] = {}
    for row in piece.to_pylist():
        absent = frozenset(row["_absent"] or ())
        at = tuple(row[name] for name in key)
        before = states.get(at)
        if absent and before is not None and before.row["_op"] != "d":
            row |= {name: before.row[name] for name in absent}
            absent &= before.absent
        states[at] = _State(row, absent)
    names = _columns(piece)
    net = NetRows()
    groups: dict[tuple[bool, frozenset[str]], list[dict[str, Any]]] = {}
    for state in states.values():
        is_delete = state.row["_op"] == "d"
        what = is_delete, frozenset() if is_delete else state.absent
        groups.setdefault(what, []).append(state.row)
    for (is_delete, absent), rows in groups.items():
        made = pa.RecordBatch.from_pylist(rows, schema=piece.schema)
        if is_delete:
            net.deletes = made.select([*key, *POSITION])
        elif not absent:
            net.upserts = made.select(names)
        else:
            there = [name for name in names if name not in absent]
            changed = tuple(name for name in there if name not in key and name not in POSITION)
            net.updates.append((changed, made.select(there)))
    return net
