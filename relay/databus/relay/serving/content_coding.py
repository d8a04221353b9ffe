"""Content codings of stream answers: gzip and zstd, for readers that request them.

A coder gets the bytes of one step of the stream and flushes at its end, so that a follower can
decode every batch as soon as it has come.  Levels are low: a coder saves network
bandwidth and must not block the event loop.
"""

from __future__ import annotations

import functools
import zlib
from typing import Protocol

import zstandard

from databus.common.frame.frame_format import Buffer

CODED_BLOCK_BYTES = 256 << 10
"""How much is coded at once: it blocks the event loop."""
_GZIP_LEVEL = 2
_GZIP_WINDOW_BITS = 31
_ZSTD_LEVEL = 1


class Coder(Protocol):
    """Encodes the pieces of one body."""

    def encode(self, data: Buffer) -> bytes:
        """The coded bytes of ``data``, all of them."""

    def finish(self) -> bytes:
        """The end of the body."""


class GzipCoder:
    """One gzip member."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW_BITS)

    def encode(self, data: Buffer) -> bytes:
        """The coded bytes of ``data``, flushed."""
        return self._stream.compress(data) + self._stream.flush(zlib.Z_SYNC_FLUSH)

    def finish(self) -> bytes:
        """The end of the member."""
        return self._stream.flush()


class ZstdCoder:
    """One zstd frame."""

    def __init__(self) -> None:
        self._stream = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj()

    def encode(self, data: Buffer) -> bytes:
        """The coded bytes of ``data``, flushed."""
        coded = self._stream.compress(data)
        return coded + self._stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)

    def finish(self) -> bytes:
        """The end of the frame."""
        return self._stream.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH)


CODERS: dict[str, type[GzipCoder] | type[ZstdCoder]] = {"zstd": ZstdCoder, "gzip": GzipCoder}
"""The offered codings, the better one first."""


@functools.lru_cache(maxsize=64)
def choose_coding(accept: str) -> str | None:
    """A name in ``CODERS`` for an Accept-Encoding header; None: the body without coding.

    Only named codings are used: without a header, or with just ``*``, the body has no coding.
    Of equal ones the better goes first; ``identity`` wins if its quality is higher.
    """
    wanted: dict[str, float] = {}
    for part in accept.lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        wanted[name] = _quality(parameters)
    best, coding = wanted.get("identity", 0.0), None
    for name in CODERS:
        quality = wanted.get(name, wanted.get("x-" + name, 0.0))
        if quality > best or (quality == best > 0 and coding is None):
            best, coding = quality, name
    return coding


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0
