"""Every outcome that two processors can have over shared memory, for small programs.

A processor may carry out two of its own operations in the other order unless a fence stands
between them, they touch the same word, or the model forbids it.  ``ARM`` forbids nothing more;
``X86`` lets only a load overtake an earlier store.  Memory itself is one for all (both are
multi-copy atomic), so an outcome is some interleaving of two such orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Op(NamedTuple):
    """``store`` WORD VALUE, ``load`` WORD into register VALUE, or ``fence``."""

    what: str
    word: str = ""
    value: int | str = 0


def store(word: str, value: int) -> Op:
    return Op("store", word, value)


def load(word: str, register: str) -> Op:
    return Op("load", word, register)


FENCE = Op("fence")


@dataclass(frozen=True, slots=True)
class Model:
    """Which pairs of operations on different words stay in order without a fence."""

    name: str
    retained: frozenset[tuple[str, str]]

    def is_kept(self, first: Op, second: Op) -> bool:
        """Whether ``first`` must be carried out before ``second``, which follows it."""
        if "fence" in (first.what, second.what) or first.word == second.word:
            return True
        return (first.what, second.what) in self.retained


ARM = Model("ARM", frozenset())
X86 = Model("x86", frozenset({("load", "load"), ("load", "store"), ("store", "store")}))


# (operations done of the writer and the reader, as bits; the words; the registers)
_State = tuple[tuple[int, int], tuple[int, ...], tuple[tuple[str, int], ...]]


def outcomes(
    model: Model, memory: dict[str, int], writer: list[Op], reader: list[Op]
) -> Iterator[dict[str, int]]:
    """The reader's registers after each possible execution, each set of values once."""
    programs = (writer, reader)
    before = [
        [
            sum(1 << at for at in range(n) if model.is_kept(program[at], program[n]))
            for n in range(len(program))
        ]
        for program in programs
    ]
    words = sorted(memory)
    index_of = {word: at for at, word in enumerate(words)}
    done = (1 << len(reader)) - 1
    start: _State = ((0, 0), tuple(memory[word] for word in words), ())
    seen = {start}
    given: set[tuple[tuple[str, int], ...]] = set()
    waiting = [start]
    while waiting:
        state = waiting.pop()
        marks, values, registers = state
        if marks[1] == done:
            if registers not in given:
                given.add(registers)
                yield dict(registers)
            continue
        for who in (0, 1):
            for n, op in enumerate(programs[who]):
                bit = 1 << n
                if marks[who] & bit or before[who][n] & ~marks[who]:
                    continue
                next_marks = (marks[0] | bit, marks[1]) if who == 0 else (marks[0], marks[1] | bit)
                after, got = values, registers
                if op.what == "store":
                    at = index_of[op.word]
                    after = (*values[:at], int(op.value), *values[at + 1 :])
                elif op.what == "load":
                    got = tuple(sorted((*registers, (str(op.value), values[index_of[op.word]]))))
                following = (next_marks, after, got)
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
