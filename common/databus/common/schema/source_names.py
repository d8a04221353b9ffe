"""The names of sources: ``schema.table``, joined and split.

A part that holds a dot or a double quote is written between double quotes, as SQL writes it, with
its own double quotes doubled: the table ``t`` of the schema ``shop.eu`` is ``"shop.eu".t``, and
``eu.t`` of ``shop`` is ``shop."eu.t"``.  All other names are written as they are.
"""

from __future__ import annotations


def join_source(schema: str, table: str) -> str:
    """The name of the table's source."""
    return f"{_written(schema)}.{_written(table)}"


def split_source(name: str) -> tuple[str, str]:
    """Schema and table of a name that ``join_source`` made, or of a glob over such names.

    A glob without a dot has no second part.
    """
    head, rest = _first_part(name)
    return head, _first_part(rest)[0] if rest.startswith('"') else rest


def _written(part: str) -> str:
    if "." in part or '"' in part:
        return '"' + part.replace('"', '""') + '"'
    return part


def _first_part(name: str) -> tuple[str, str]:
    """The part before the first dot outside of quotes, and what follows the dot."""
    if not name.startswith('"'):
        head, _, rest = name.partition(".")
        return head, rest
    at = 1
    while (end := name.find('"', at)) >= 0 and name[end : end + 2] == '""':
        at = end + 2
    if end < 0 or name[end + 1 : end + 2] not in ("", "."):
        head, _, rest = name.partition(".")  # not a name of ours, but a user's glob
        return head, rest
    return name[1:end].replace('""', '"'), name[end + 2 :]
