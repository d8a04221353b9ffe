"""Loops over bytes that several rooms share, compiled by numba if it is installed.

What belongs here: functions over ``uint8`` arrays and plain integers that are called for
every frame.  What does not: anything that touches a Python object per event.

Each kernel is ordinary Python.  ``jit`` compiles it when numba is importable and
``DATABUS_NO_NUMBA`` is not set; otherwise the same function runs undecorated, so that the
client installs without numba and tests can compare the two.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T", bound=tuple[int, ...])

U8Array = npt.NDArray[np.uint8]
I64Array = npt.NDArray[np.int64]

COMPILED = not os.environ.get("DATABUS_NO_NUMBA") and importlib.util.find_spec("numba") is not None

if TYPE_CHECKING:

    def jit(function: _F) -> _F: ...

    def jit_uncounted(function: _F) -> _F: ...

    def i64(value: Any) -> int:
        """The number as a machine word: shifts wrap as they do in compiled code."""

    def whole(numbers: _T) -> _T:
        """The numbers that a kernel returned, as Python's own: undecorated it returns numpy's."""

else:
    i64 = np.int64

    def jit(function):
        """Compile ``function`` (nopython, no GIL, cached on disk) if numba is there."""
        return _Kernel(lambda: _njit(function, counted=True)) if COMPILED else function

    def whole(numbers):
        return numbers if COMPILED else tuple(map(int, numbers))

    def jit_uncounted(function):
        """The same for a function that makes no arrays: no copies, no slices that are assigned.

        Otherwise numba counts the references to its arguments, atomically and at every call,
        which took half of the time of a walk over a stream.
        """
        return _Kernel(lambda: _njit(function, counted=False)) if COMPILED else function


class _Kernel:
    """What numba makes of a function, made when the function is first called.

    So a program that imports a kernel loads numba only if it calls one (a fifth of a second).

    Owner: any thread; two that make it at once make the same.
    Raises: ImportError, at the first call, if numba is installed but cannot be imported.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._made(*arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"a kernel has no {name}")
        return getattr(self._made, name)

    @functools.cached_property
    def _made(self) -> Any:
        return self._make()

    @property
    def _numba_type_(self) -> Any:
        """Numba looks here for the type of a global that a kernel calls."""
        from numba.core.registry import cpu_target

        return cpu_target.typing_context.resolve_value_type(self._made)


def _njit(function: Callable[..., Any], *, counted: bool) -> Any:
    # The counting runtime has no public switch.
    return _numba().njit(cache=True, nogil=True, _nrt=counted)(function)


@functools.cache
def _numba() -> Any:
    import numba
    from numba.core import event

    class CompileNotice(event.Listener):
        """Logs once why a first start takes so long."""

        is_logged = False

        def on_start(self, _: Any) -> None:
            if not self.is_logged:
                self.is_logged = True
                logging.getLogger("databus").warning(
                    "compiling loops for this processor: once after an installation, up to a minute"
                )

        def on_end(self, _: Any) -> None:
            pass

    event.register("numba:compile", CompileNotice())
    return numba


def _intrinsic(name: str, *arguments: Any) -> Any:
    """An operation of ``intrinsics``, made with the arguments if there are any."""

    def make() -> Any:
        from numba.core.registry import cpu_target

        found = getattr(importlib.import_module("databus.common.compiled.intrinsics"), name)
        made = found(*arguments) if arguments else found
        cpu_target.typing_context.refresh()  # It is made while numba compiles what calls it.
        return made

    return _Kernel(make)


def crc_tables(polynomial: int) -> I64Array:
    """Slicing-by-8 tables of a 32-bit CRC with this reflected polynomial: (8, 256)."""
    tables = np.zeros((8, 256), dtype=np.int64)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (polynomial if crc & 1 else 0)
        tables[0, byte] = crc
    for slice_ in range(1, 8):
        previous = tables[slice_ - 1]
        tables[slice_] = tables[0][previous & 0xFF] ^ (previous >> 8)
    return tables


CRC32C_TABLES = crc_tables(0x82F63B78)


@jit_uncounted
def load_u16(buf: U8Array, at: int) -> int:
    """The little-endian 16-bit number at ``at``."""
    return i64(buf[at]) | i64(buf[at + 1]) << 8


@jit_uncounted
def load_u32(buf: U8Array, at: int) -> int:
    """The little-endian 32-bit number at ``at``."""
    return i64(buf[at]) | i64(buf[at + 1]) << 8 | i64(buf[at + 2]) << 16 | i64(buf[at + 3]) << 24


@jit_uncounted
def load_i64(buf: U8Array, at: int) -> int:
    """The little-endian 64-bit number at ``at``, as two's complement."""
    return load_u32(buf, at) | load_u32(buf, at + 4) << 32


@jit_uncounted
def holds(ascending: npt.NDArray[Any], first: int, stop: int, value: int) -> bool:
    """Whether ``value`` is one of ``ascending[first:stop]``."""
    low, high = first, stop
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low < stop and ascending[low] == value


@jit_uncounted
def crc_by_tables(tables: I64Array, buf: U8Array, at: int, stop: int, crc: int) -> int:
    """The state ``crc`` after ``buf[at:stop]``, eight bytes a step."""
    while at + 8 <= stop:
        low = crc ^ load_u32(buf, at)
        crc = (
            tables[7, low & 0xFF]
            ^ tables[6, (low >> 8) & 0xFF]
            ^ tables[5, (low >> 16) & 0xFF]
            ^ tables[4, (low >> 24) & 0xFF]
            ^ tables[3, buf[at + 4]]
            ^ tables[2, buf[at + 5]]
            ^ tables[1, buf[at + 6]]
            ^ tables[0, buf[at + 7]]
        )
        at += 8
    while at < stop:
        crc = tables[0, (crc ^ i64(buf[at])) & 0xFF] ^ (crc >> 8)
        at += 1
    return crc


@jit_uncounted
def crc32c_by_tables(buf: U8Array, start: int, stop: int) -> int:
    """CRC-32C of ``buf[start:stop]`` on any processor, 2 GB/s compiled."""
    return crc_by_tables(CRC32C_TABLES, buf, start, stop, i64(0xFFFFFFFF)) ^ 0xFFFFFFFF


def _has_sse42() -> bool:
    try:
        return " sse4_2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


if COMPILED and _has_sse42():
    _crc_words = _intrinsic("crc_words")

    @jit_uncounted
    def crc32c(buf: U8Array, start: int, stop: int) -> int:
        """CRC-32C of ``buf[start:stop]`` by the processor's instruction, 6 GB/s."""
        words = (stop - start) >> 3
        crc = _crc_words(buf, start, words, i64(0xFFFFFFFF))
        return crc_by_tables(CRC32C_TABLES, buf, start + 8 * words, stop, crc) ^ 0xFFFFFFFF

elif COMPILED:
    crc32c = crc32c_by_tables

else:

    def crc32c(buf: U8Array, start: int, stop: int) -> int:
        """CRC-32C of ``buf[start:stop]`` by the library."""
        return int(google_crc32c.value(buf[start:stop].tobytes()))


if COMPILED:
    _move = _intrinsic("move")

    @jit_uncounted
    def copy(to: U8Array, at: int, source: U8Array, start: int, count: int) -> None:
        """memcpy of ``source[start : start + count]`` to ``to[at:]``; nothing is checked."""
        _move(to, at, source, start, count)

else:

    def copy(to: U8Array, at: int, source: U8Array, start: int, count: int) -> None:
        """Copy ``source[start : start + count]`` to ``to[at:]``."""
        to[at : at + count] = source[start : start + count]


def record_writer(bits: tuple[int, ...]) -> Callable[[U8Array, int, tuple[int, ...]], None]:
    """A kernel ``(out, at, values)`` that writes whole numbers, little-endian, back to back.

    ``bits`` are their widths, which fill words of 64 bits or a single one in part.  Higher bits
    of a value are ignored, so that negative numbers are two's complement.
    """
    if COMPILED:
        written: Callable[[U8Array, int, tuple[int, ...]], None] = _intrinsic("record_writer", bits)
        return written
    layout = struct.Struct("<" + "".join({8: "B", 16: "H", 32: "I", 64: "Q"}[n] for n in bits))
    masks = [(1 << n) - 1 for n in bits]

    def write(out: U8Array, at: int, values: tuple[int, ...]) -> None:
        layout.pack_into(
            out.data, at, *(int(value) & mask for value, mask in zip(values, masks, strict=True))
        )

    return write


@jit_uncounted
def put_digits(out: U8Array, at: int, value: int) -> int:
    """Write a non-negative number in decimal digits; returns the offset after them."""
    digits = 1
    rest = value // 10
    while rest:
        digits += 1
        rest //= 10
    for index in range(digits):
        out[at + digits - 1 - index] = 48 + value % 10
        value //= 10
    return at + digits
