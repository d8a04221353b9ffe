"""Operations that numba does not offer: memcpy, CRC-32C in hardware, stores of packed records.

Only compiled code may call these.  ``kernels`` decides whether it does, and imports this module,
which loads numba, when such code is made.  ``crc_words`` needs an x86 with SSE 4.2.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array


@intrinsic
def move(_: Any, to: Any, at: Any, source: Any, start: Any, count: Any) -> Any:
    """Copy ``source[start : start + count]`` to ``to[at:]``; nothing is checked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = make_array(signature.args[0])(context, builder, args[0]).data
        origin = make_array(signature.args[2])(context, builder, args[2]).data
        cgutils.raw_memcpy(
            builder,
            builder.gep(target, [args[1]]),
            builder.gep(origin, [args[3]]),
            args[4],
            1,
        )
        return context.get_dummy_value()

    return types.void(to, types.int64, source, types.int64, types.int64), generate


@intrinsic
def crc_words(_: Any, buf: Any, start: Any, count: Any, crc: Any) -> Any:
    """The state ``crc`` of a CRC-32C after ``count`` 8-byte words from ``start`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        instruction = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(word, [word, word]),
            "llvm.x86.sse42.crc32.64.64",
        )
        data = make_array(signature.args[0])(context, builder, args[0]).data
        words = builder.bitcast(builder.gep(data, [args[1]]), word.as_pointer())
        state = cgutils.alloca_once_value(builder, args[3])
        with cgutils.for_range(builder, args[2]) as loop:
            found = builder.load(builder.gep(words, [loop.index]), align=1)
            builder.store(builder.call(instruction, [builder.load(state), found]), state)
        return builder.load(state)

    return types.int64(buf, types.int64, types.int64, types.int64), generate


def record_writer(bits: tuple[int, ...]) -> Any:
    """A function that writes whole numbers of these widths; nothing is checked."""

    @intrinsic
    def write(_: Any, out: Any, at: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = make_array(signature.args[0])(context, builder, args[0]).data
            to, word, filled = builder.gep(data, [args[1]]), None, 0
            for number, width in enumerate(bits):
                value = builder.extract_value(args[2], number)
                if filled + width < 64:
                    value = builder.and_(value, value.type((1 << width) - 1))
                value = builder.shl(value, value.type(filled))
                word = value if word is None else builder.or_(word, value)
                filled += width
                if filled == 64 or number == len(bits) - 1:
                    # One store a word: the CRC reads words, and would stall on smaller stores.
                    written = builder.trunc(word, ir.IntType(filled)) if filled < 64 else word
                    builder.store(written, builder.bitcast(to, written.type.as_pointer()), align=1)
                    to = builder.gep(to, [ir.IntType(64)(8)])
                    word, filled = None, 0
            return context.get_dummy_value()

        return types.void(out, types.int64, values), generate

    return write
