"""Compares texts in their UTF-8 buffers: by code point, in another case, by LIKE patterns.

See ``predicate_kernels`` for UNSURE: letters beyond ASCII that change their case are left
to Python.
"""

from __future__ import annotations

from databus.common.compiled.kernels import U8Array, i64, jit_uncounted

FALSE, TRUE, NULL, LACKING, UNSURE = range(5)
EQUAL, NOT_EQUAL, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL = range(6)
FOLD_NONE, FOLD_LOWER, FOLD_UPPER, FOLD_UUID = range(4)

# Tokens of a LIKE pattern: two bytes each.
LITERAL, ANY_CHARACTER, ANY_TEXT = range(3)
LIKE_STEPS_A_BYTE = 16


@jit_uncounted
def compare(order: int, how: int) -> int:
    """The truth of a comparison whose sides are in this order: negative, 0 or positive."""
    if how == EQUAL:
        return TRUE if order == 0 else FALSE
    if how == NOT_EQUAL:
        return TRUE if order != 0 else FALSE
    if how == LESS:
        return TRUE if order < 0 else FALSE
    if how == LESS_EQUAL:
        return TRUE if order <= 0 else FALSE
    if how == GREATER:
        return TRUE if order > 0 else FALSE
    return TRUE if order >= 0 else FALSE


@jit_uncounted
def _folded(byte: int, fold: int) -> int:
    """An ASCII letter in its other case, or -1 for all other letters."""
    if fold == FOLD_NONE:
        return byte
    if byte >= 0x80:
        return -1
    if fold == FOLD_UPPER:
        return byte - 32 if 97 <= byte <= 122 else byte
    return byte + 32 if 65 <= byte <= 90 else byte


@jit_uncounted
def compare_bytes(
    left: U8Array,
    at: int,
    size: int,
    fold: int,
    right: U8Array,
    other_at: int,
    other_size: int,
    other_fold: int,
    how: int,
) -> int:
    """The truth of a comparison of two texts by code point, which is that of their bytes."""
    for index in range(min(size, other_size)):
        one = _folded(i64(left[at + index]), fold)
        other = _folded(i64(right[other_at + index]), other_fold)
        if one < 0 or other < 0:
            return UNSURE
        if one != other:
            return compare(one - other, how)
    return compare(size - other_size, how)


@jit_uncounted
def _next_character(buf: U8Array, at: int, stop: int) -> int:
    at += 1
    while at < stop and buf[at] & 0xC0 == 0x80:
        at += 1
    return at


@jit_uncounted
def like(
    buf: U8Array, at: int, stop: int, tokens: U8Array, token: int, last: int, fold: int
) -> int:
    """Whether a text matches a pattern: greedy, with one position to go back to.

    UNSURE after some steps a byte: only a pattern made for this purpose takes more.
    """
    back_token = -1
    back_at = -1
    for _ in range(LIKE_STEPS_A_BYTE * (stop - at + last - token)):
        if token < last and tokens[token] == ANY_TEXT:
            token += 2
            back_token, back_at = token, at
            continue
        if at >= stop:
            return TRUE if token >= last else FALSE
        fits = False
        if token < last:
            byte = _folded(i64(buf[at]), fold)
            if byte < 0:
                return UNSURE
            if tokens[token] == ANY_CHARACTER:
                at = _next_character(buf, at, stop)
                token += 2
                continue
            fits = byte == i64(tokens[token + 1])
        if fits:
            at += 1
            token += 2
            continue
        if back_token < 0:
            return FALSE
        if back_token >= last:
            return TRUE
        back_at = _next_character(buf, back_at, stop)
        token, at = back_token, back_at
    return TRUE if at >= stop and token >= last else UNSURE


@jit_uncounted
def length(buf: U8Array, at: int, size: int, fold: int) -> int:
    """How many characters a text has; -1 if changing its case may change that."""
    count = i64(0)
    for offset in range(at, at + size):
        byte = buf[offset]
        if byte >= 0x80 and fold != FOLD_NONE:
            return i64(-1)
        if byte & 0xC0 != 0x80:
            count += 1
    return count
