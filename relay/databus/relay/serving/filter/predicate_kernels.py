"""``where=`` over many frames at once: rows are read as far as the predicate needs.

A program is a table of instructions for two stacks, one of numbers and one of truths, made by
``predicate_program``.  The kernels walk the Avro records of frames and run the program over the
values.  Every walk is total: the ring's writer may overwrite the bytes
meanwhile, so nothing outside the array is read, and the caller then discards the result.

A truth is one of FALSE .. UNSURE, a value has one of the states VALUE .. UNSURE.  LACKING: the
image lacks a column.  UNSURE: only Python can decide (numbers beyond 64 bits, letters beyond
ASCII that change their case, bytes that are no record).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from databus.common.compiled.avro_row_kernels import BOOLEAN, DECIMAL, DOUBLE, LONG, varint
from databus.common.compiled.kernels import (
    I64Array,
    U8Array,
    holds,
    i64,
    jit,
    jit_uncounted,
    load_i64,
)
from databus.common.frame.header_layout import (
    DELETE,
    HAS_AFTER,
    HAS_BEFORE,
    HEADER_BYTES,
    TRUNCATE,
    UPDATE,
    flags_of,
    op_of,
    parts_of,
)
from databus.relay.serving.filter.text_kernels import (
    EQUAL,
    FALSE,
    FOLD_NONE,
    FOLD_UUID,
    GREATER,
    LACKING,
    LESS,
    LESS_EQUAL,
    NOT_EQUAL,
    NULL,
    TRUE,
    UNSURE,
    compare,
    compare_bytes,
    length,
    like,
)

F64Array = npt.NDArray[np.float64]

VALUE = 1
"""The state of a value that exists; the other states are as for truths."""

LEFT_OUT, TAKEN, UNDECIDED = 0, 1, -1

MAX_DEPTH = 64
"""How many numbers, or truths, a program may have on its stack."""

# Instructions: (code, a, b, c, d).  A slot is a column that the program needs; a text is given
# by the index of its start and stop among the constants.
(
    PUSH_SLOT,  # a: slot; a whole number, or the bits of a real one
    PUSH_NUMBER,  # a: the number, or the bits of a real one
    PUSH_LENGTH,  # a: slot, b: FOLD_*; characters
    PUSH_SIZE,  # a: slot; bytes
    TO_REAL,
    ADD,
    SUBTRACT,
    MULTIPLY,
    REMAINDER,
    NEGATE,
    ADD_REAL,
    SUBTRACT_REAL,
    MULTIPLY_REAL,
    DIVIDE_REAL,
    NEGATE_REAL,
    COMPARE,  # a: EQUAL ..
    COMPARE_REAL,  # a: EQUAL ..
    IN_RANGE,  # a..b, c: 1 to invert
    IN_NUMBERS,  # a: index of the first among the constants, b: how many, ascending
    IS_TRUE_NUMBER,
    NUMBER_IS_NULL,
    SLOT_IS_NULL,  # a: slot
    NULL_SLOT,  # a: slot; NULL, or LACKING
    COMPARE_TEXT,  # a: slot, b: index of a text, c: EQUAL .., d: FOLD_*
    COMPARE_SLOTS,  # a: slot, b: slot, c: EQUAL .., d: FOLD_* of a + 4 * FOLD_* of b
    IN_TEXTS,  # a: slot, b: index of the first text, c: how many, d: FOLD_*
    LIKE,  # a: slot, b: index of the pattern's tokens, d: FOLD_*
    PUSH_TRUTH,  # a: the truth
    AND,
    OR,
    NOT,
    IS_TRUTH,  # a: FALSE or TRUE
    TRUTH_IS_NULL,
) = range(33)

_UUID_CHARS = 36
_WHOLE_BOUND = 1 << 62
_FACTOR_BOUND = 1 << 31


@jit_uncounted
def _read_record(
    buf: U8Array,
    at: int,
    stop: int,
    layout: I64Array,
    work: I64Array,
    base: int,
    slots: int,
) -> bool:
    """Read a record as far as ``layout`` goes: rows of (code, nullable, slot or -1).

    ``work[base:]`` gets the slots' states, then their numbers, the bits of their doubles or
    where their bytes begin, then how many bytes there are.
    """
    for slot in range(slots):
        work[base + slot] = LACKING
    for column in range(len(layout)):
        slot = layout[column, 2]
        if layout[column, 1]:
            branch, at = varint(buf, at, stop)
            if at < 0 or branch < 0 or branch > 1:
                return False
            if branch == 0:
                if slot >= 0:
                    work[base + slot] = NULL
                continue
        code = layout[column, 0]
        low = i64(0)
        size = i64(0)
        state = VALUE
        if code == LONG:
            low, at = varint(buf, at, stop)
            if at < 0:
                return False
        elif code == BOOLEAN:
            if at >= stop or buf[at] > 1:
                return False
            low = i64(buf[at])
            at += 1
        elif code == DOUBLE:
            if at + 8 > stop:
                return False
            low = load_i64(buf, at)
            at += 8
        else:
            size, at = varint(buf, at, stop)
            if at < 0 or size < 0 or size > stop - at:
                return False
            low = i64(at)
            at += size
            if code == DECIMAL and slot >= 0:
                if size == 0:
                    return False
                start = low
                if size > 8:
                    state = UNSURE
                low = i64(-1) if buf[start] & 0x80 else i64(0)
                for byte_at in range(start, min(at, start + 8)):
                    low = low << 8 | i64(buf[byte_at])
        if slot >= 0:
            work[base + slot] = state
            work[base + slots + slot] = low
            work[base + 2 * slots + slot] = size
    return True


@jit_uncounted
def _compare_real(left: float, right: float, how: int) -> int:
    if how == EQUAL:
        return TRUE if left == right else FALSE
    if how == NOT_EQUAL:
        return TRUE if left != right else FALSE
    if how == LESS:
        return TRUE if left < right else FALSE
    if how == LESS_EQUAL:
        return TRUE if left <= right else FALSE
    if how == GREATER:
        return TRUE if left > right else FALSE
    return TRUE if left >= right else FALSE


@jit_uncounted
def _text(
    buf: U8Array,
    program: I64Array,
    number: int,
    constants: I64Array,
    texts: U8Array,
    work: I64Array,
    slots: int,
) -> int:
    """The truth of an instruction about texts whose columns have values."""
    code, slot, operand = program[number, 0], program[number, 1], program[number, 2]
    how, fold = program[number, 3], program[number, 4]
    at, size = work[slots + slot], work[2 * slots + slot]
    if code == COMPARE_SLOTS:
        other_at, other_size = work[slots + operand], work[2 * slots + operand]
        return compare_bytes(buf, at, size, fold & 3, buf, other_at, other_size, fold >> 2, how)
    if fold == FOLD_UUID and size != _UUID_CHARS:
        return UNSURE
    start, stop = constants[operand], constants[operand + 1]
    if code == LIKE:
        return like(buf, at, at + size, texts, start, stop, fold)
    if code == COMPARE_TEXT:
        return compare_bytes(buf, at, size, fold, texts, start, stop - start, FOLD_NONE, how)
    found = FALSE
    for index in range(how):
        start = constants[operand + 2 * index]
        length = constants[operand + 2 * index + 1] - start
        if fold == FOLD_NONE and length != size:
            continue
        truth = compare_bytes(buf, at, size, fold, texts, start, length, FOLD_NONE, EQUAL)
        if truth == TRUE:
            return TRUE
        found = max(found, truth)
    return found


@jit_uncounted
def _whole(code: int, left: int, right: int) -> tuple[int, int]:
    """(state, result) of an operation on two whole numbers."""
    if left > _WHOLE_BOUND or left < -_WHOLE_BOUND or right > _WHOLE_BOUND or right < -_WHOLE_BOUND:
        return UNSURE, i64(0)
    if code == ADD:
        return VALUE, left + right
    if code == SUBTRACT:
        return VALUE, left - right
    if code == REMAINDER:
        if right == 0:
            return NULL, i64(0)
        rest = abs(left) % abs(right)
        return VALUE, -rest if left < 0 else rest
    if (
        left > _FACTOR_BOUND
        or left < -_FACTOR_BOUND
        or right > _FACTOR_BOUND
        or right < -_FACTOR_BOUND
    ):
        return UNSURE, i64(0)
    return VALUE, left * right


@jit_uncounted
def _run(
    buf: U8Array,
    program: I64Array,
    constants: I64Array,
    texts: U8Array,
    work: I64Array,
    reals: F64Array,
    slots: int,
) -> int:
    """The truth of a program over the slots at the start of ``work``.

    Its stacks follow them: numbers, their states, truths.  ``reals`` is ``work`` as doubles.
    """
    stack = 6 * slots
    marks = stack + MAX_DEPTH
    truths = marks + MAX_DEPTH
    top = -1
    truth = -1
    for number in range(len(program)):
        code, a, b = program[number, 0], program[number, 1], program[number, 2]
        if code == PUSH_SLOT:
            top += 1
            work[marks + top], work[stack + top] = work[a], work[slots + a]
        elif code == PUSH_NUMBER:
            top += 1
            work[marks + top], work[stack + top] = VALUE, a
        elif code == PUSH_LENGTH or code == PUSH_SIZE:
            slot = a
            top += 1
            work[marks + top] = work[slot]
            if work[slot] == VALUE:
                work[stack + top] = work[2 * slots + slot]
                if code == PUSH_LENGTH:
                    work[stack + top] = length(buf, work[slots + slot], work[2 * slots + slot], b)
                    if work[stack + top] < 0:
                        work[marks + top] = UNSURE
        elif code == TO_REAL:
            if work[marks + top] == VALUE:
                reals[stack + top] = float(work[stack + top])
        elif ADD <= code <= REMAINDER:
            top -= 1
            work[marks + top] = max(work[marks + top], work[marks + top + 1])
            if work[marks + top] == VALUE:
                work[marks + top], work[stack + top] = _whole(
                    code, work[stack + top], work[stack + top + 1]
                )
        elif code == NEGATE:
            if work[marks + top] == VALUE:
                work[marks + top], work[stack + top] = _whole(SUBTRACT, i64(0), work[stack + top])
        elif ADD_REAL <= code <= DIVIDE_REAL:
            top -= 1
            work[marks + top] = max(work[marks + top], work[marks + top + 1])
            if work[marks + top] == VALUE:
                left, right = float(reals[stack + top]), float(reals[stack + top + 1])
                if code == ADD_REAL:
                    reals[stack + top] = left + right
                elif code == SUBTRACT_REAL:
                    reals[stack + top] = left - right
                elif code == MULTIPLY_REAL:
                    reals[stack + top] = left * right
                elif right == 0.0:
                    work[marks + top] = NULL
                else:
                    reals[stack + top] = left / right
        elif code == NEGATE_REAL:
            if work[marks + top] == VALUE:
                reals[stack + top] = -reals[stack + top]
        elif code == COMPARE or code == COMPARE_REAL:
            top -= 2
            truth += 1
            work[truths + truth] = max(work[marks + top + 1], work[marks + top + 2])
            if work[truths + truth] == VALUE:
                if code == COMPARE_REAL:
                    work[truths + truth] = _compare_real(
                        reals[stack + top + 1], reals[stack + top + 2], a
                    )
                else:
                    one, other = work[stack + top + 1], work[stack + top + 2]
                    order = 0 if one == other else (-1 if one < other else 1)
                    work[truths + truth] = compare(order, a)
        elif code == IN_RANGE or code == IN_NUMBERS or code == IS_TRUE_NUMBER:
            truth += 1
            work[truths + truth] = work[marks + top]
            if work[marks + top] == VALUE:
                value = work[stack + top]
                if code == IN_RANGE:
                    work[truths + truth] = i64(a <= value <= b) ^ program[number, 3]
                elif code == IN_NUMBERS:
                    work[truths + truth] = i64(holds(constants, a, a + b, value))
                else:
                    work[truths + truth] = i64(value != 0)
            top -= 1
        elif code == NUMBER_IS_NULL:
            truth += 1
            mark = work[marks + top]
            work[truths + truth] = FALSE if mark == VALUE else (TRUE if mark == NULL else mark)
            top -= 1
        elif code == SLOT_IS_NULL or code == NULL_SLOT:
            truth += 1
            state = work[a]
            if state == LACKING:
                work[truths + truth] = LACKING
            elif code == NULL_SLOT:
                work[truths + truth] = NULL
            else:
                work[truths + truth] = TRUE if state == NULL else FALSE
        elif COMPARE_TEXT <= code <= LIKE:
            truth += 1
            found = i64(work[a])
            if code == COMPARE_SLOTS:
                found = max(found, i64(work[b]))
            if found == VALUE:
                found = _text(buf, program, number, constants, texts, work, slots)
            work[truths + truth] = found
        elif code == PUSH_TRUTH:
            truth += 1
            work[truths + truth] = a
        elif code == AND or code == OR:
            truth -= 1
            one, other = work[truths + truth], work[truths + truth + 1]
            decisive = FALSE if code == AND else TRUE
            if one == decisive or other == decisive:
                work[truths + truth] = decisive
            elif one == 1 - decisive:
                work[truths + truth] = other
            elif other != 1 - decisive:
                work[truths + truth] = max(one, other)
        elif code == NOT:
            if work[truths + truth] <= TRUE:
                work[truths + truth] = TRUE - work[truths + truth]
        elif code == IS_TRUTH:
            if work[truths + truth] <= NULL:
                work[truths + truth] = TRUE if work[truths + truth] == a else FALSE
        elif code == TRUTH_IS_NULL and work[truths + truth] <= NULL:
            work[truths + truth] = TRUE if work[truths + truth] == NULL else FALSE
    return i64(work[truths + 0])


@jit_uncounted
def _read_after(
    buf: U8Array,
    before: int,
    after: int,
    absent: int,
    stop: int,
    has_before: bool,
    layout: I64Array,
    slot_columns: I64Array,
    work: I64Array,
) -> bool:
    """Read the row after a change; what a partial one lacks is as it was before."""
    slots = len(slot_columns)
    if not _read_record(buf, after, absent, layout, work, 0, slots):
        return False
    if absent == stop:
        return True
    is_partial = False
    for slot in range(slots):
        byte = absent + (slot_columns[slot] >> 3)
        if byte < stop and buf[byte] >> (slot_columns[slot] & 7) & 1:
            work[slot] = LACKING
            is_partial = True
    if not is_partial or not has_before:
        return True
    if not _read_record(buf, before, after, layout, work, 3 * slots, slots):
        return False
    for slot in range(slots):
        if work[slot] == LACKING:
            for part in range(3):
                work[part * slots + slot] = work[(3 + part) * slots + slot]
    return True


@jit
def match_frames(
    buf: U8Array,
    offsets: I64Array,
    chosen: I64Array,
    row_layout: I64Array,
    key_layout: I64Array,
    slot_columns: I64Array,
    program: I64Array,
    constants: I64Array,
    texts: U8Array,
    matches: npt.NDArray[np.int8],
) -> None:
    """Fill in the matches of the frames at ``offsets[i]``, i in ``chosen``, all of one schema.

    ``buf`` is read-only (one form of it is compiled).  Frames that Python has to decide are
    UNDECIDED.  ``slot_columns`` are the indices of the slots' columns in the row.
    """
    slots = len(slot_columns)
    work = np.empty(6 * slots + 3 * MAX_DEPTH, dtype=np.int64)
    reals = work.view(np.float64)
    for number in range(len(chosen)):
        index = chosen[number]
        matches[index] = UNDECIDED
        at = offsets[index]
        op = op_of(buf, at)
        if op == TRUNCATE:
            matches[index] = TAKEN
            continue
        flags = flags_of(buf, at)
        key_len, before_len, after_len, absent_len = parts_of(buf, at)
        key = at + HEADER_BYTES
        before = key + key_len
        after = before + before_len
        absent = after + after_len
        stop = absent + absent_len
        if stop > len(buf):
            continue
        for image in range(1 if op == DELETE else 0, 2):
            if image == 0:
                is_read = flags & HAS_AFTER != 0 and _read_after(
                    buf, before, after, absent, stop, flags & HAS_BEFORE != 0, row_layout,
                    slot_columns, work,
                )  # fmt: skip
            elif flags & HAS_BEFORE:
                is_read = _read_record(buf, before, after, row_layout, work, 0, slots)
            elif before > key:
                is_read = _read_record(buf, key, before, key_layout, work, 0, slots)
            else:
                is_read = True
                work[:slots] = LACKING
            if not is_read:
                break
            truth = _run(buf, program, constants, texts, work, reals, slots)
            if truth == UNSURE:
                break
            if truth == TRUE or truth == LACKING:
                matches[index] = TAKEN
                break
            if image == 1 or op != UPDATE:
                matches[index] = LEFT_OUT
                break


def warm_up() -> None:
    """Compile the kernel, or load it from the cache."""
    none = np.zeros(0, dtype=np.int64)
    table = np.zeros((0, 3), dtype=np.int64)
    lines = np.zeros((0, 5), dtype=np.int64)
    texts = np.zeros(0, dtype=np.uint8)
    buf = np.zeros(0, dtype=np.uint8)
    buf.flags.writeable = False
    matches = np.zeros(0, dtype=np.int8)
    match_frames(buf, none, none, table, table, none, lines, none, texts, matches)
