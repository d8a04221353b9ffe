"""The table of dead letters in an application's database: its statements.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from databus.client.checkpoints.checkpoint_table import Statement, checked_table
from databus.client.deadletters.dead_letter import DeadLetter

_PART_CHARACTERS = 60_000
_DDL = """\
CREATE TABLE IF NOT EXISTS {table} (
    consumer VARCHAR(190) NOT NULL,
    position VARCHAR(40) NOT NULL,
    part INTEGER NOT NULL,
    letter TEXT NOT NULL,
    PRIMARY KEY (consumer, position, part)
)"""


class DeadLetterTable:
    """Statements over one table.  A letter is cut into rows, since MySQL's TEXT has 64 KB."""

    def __init__(self, name: str) -> None:
        self.name = checked_table(name)
        self.ddl = _DDL.format(table=name)
        """The statement that creates the table, for an account that may."""

    def putting(self, consumer: str, letters: Sequence[DeadLetter]) -> list[Statement]:
        """Store letters; one of the same position is replaced."""
        statements = self.removing(consumer, letters)
        for one in letters:
            text = one.to_json()
            for part, start in enumerate(range(0, len(text), _PART_CHARACTERS)):
                values = (_place(one), part, text[start : start + _PART_CHARACTERS])
                statements.append(
                    (f"INSERT INTO {self.name} VALUES (?, ?, ?, ?)", (consumer, *values))
                )
        return statements

    def removing(self, consumer: str, letters: Sequence[DeadLetter]) -> list[Statement]:
        """Remove letters, by their positions."""
        statement = f"DELETE FROM {self.name} WHERE consumer = ? AND position = ?"
        return [(statement, (consumer, _place(one))) for one in letters]

    def reading(self, consumer: str) -> Statement:
        """Read the rows of a consumer's letters, for ``letters_of``."""
        sql = f"SELECT position, letter FROM {self.name} WHERE consumer = ? ORDER BY position, part"
        return sql, (consumer,)


def letters_of(rows: Iterable[Sequence[Any]]) -> list[DeadLetter]:
    """The letters in the rows of ``DeadLetterTable.reading``, by position."""
    texts: dict[str, str] = {}
    for place, text in rows:
        texts[place] = texts.get(place, "") + text
    return [DeadLetter.from_json(text) for text in texts.values()]


def _place(letter: DeadLetter) -> str:
    """The position as text that sorts as positions do."""
    return f"{letter.scn:020d}:{letter.seq:010d}"
