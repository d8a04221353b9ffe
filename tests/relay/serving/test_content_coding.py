"""gzip and zstd on request: the same bytes, batch by batch."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path

import aiohttp
import pytest
import zstandard

from databus.common.frame.frame_format import Op, iter_frames
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.relay.serving.content_coding import CODERS, choose_coding
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import PATIENCE


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        ("", None),
        ("*", None),
        ("identity", None),
        ("br, deflate", None),
        ("gzip", "gzip"),
        ("x-gzip", "gzip"),
        ("GZIP;q=0.5", "gzip"),
        ("gzip, zstd", "zstd"),
        ("gzip, zstd;q=0.9", "gzip"),
        ("gzip;q=0", None),
        ("gzip;q=much", None),
        ("gzip, identity", "gzip"),
        ("gzip;q=0.5, identity", None),
        ("zstd;q=0, gzip;q=0.1", "gzip"),
    ],
)
def test_a_coding_is_used_if_it_is_named_and_not_wanted_less(
    accept: str, coding: str | None
) -> None:
    assert choose_coding(accept) == coding


class Decoder:
    def __init__(self, coding: str) -> None:
        self.stream = (
            zlib.decompressobj(31)
            if coding == "gzip"
            else zstandard.ZstdDecompressor().decompressobj()
        )

    def decode(self, data: bytes) -> bytes:
        return bytes(self.stream.decompress(data))


@pytest.mark.parametrize("coding", sorted(CODERS))
def test_each_piece_can_be_decoded_before_the_next_comes(coding: str) -> None:
    coder, decoder = CODERS[coding](), Decoder(coding)
    for piece in (b"one" * 500, b"", memoryview(b"two"), b"three" * 100_000):
        assert decoder.decode(coder.encode(piece)) == bytes(piece)
    assert decoder.decode(coder.finish()) == b""
    assert decoder.stream.eof


def raw_session(accept_encoding: str) -> aiohttp.ClientSession:
    headers = {"Accept": FRAMES_TYPE, "Accept-Encoding": accept_encoding}
    return aiohttp.ClientSession(headers=headers, auto_decompress=False)


@pytest.mark.parametrize("coding", sorted(CODERS))
async def test_a_coded_poll_holds_the_same_bytes_in_fewer(tmp_path: Path, coding: str) -> None:
    live = LiveRelay(tmp_path)
    blocks = [window(n, [(Op.INSERT, ORDERS, n)] * 20, text="paid " * 20) for n in range(1, 60)]
    live.append(*blocks)
    async with live.served(), raw_session(coding) as http:
        async with http.get(f"{live.url}/v1/shop/stream") as answer:
            body = await answer.read()
    live.close()
    assert answer.headers["Content-Encoding"] == coding
    assert answer.headers["Vary"] == "Accept, Accept-Encoding"
    assert Decoder(coding).decode(body) == b"".join(blocks)
    assert len(body) < sum(map(len, blocks)) / 2


@pytest.mark.parametrize("coding", sorted(CODERS))
async def test_a_coded_follower_gets_each_window_when_it_is_committed(
    tmp_path: Path, coding: str
) -> None:
    live = LiveRelay(tmp_path, heartbeat="30s")
    decoder, read = Decoder(coding), b""
    async with live.served(), raw_session(coding) as http:
        url = f"{live.url}/v1/shop/stream"
        async with http.get(url, params={"follow": "true"}) as answer:
            for scn in range(1, 6):
                block = window(scn, [(Op.INSERT, ORDERS, scn)])
                live.append(block)
                async with asyncio.timeout(5 * PATIENCE):
                    while not read.endswith(block):
                        read += decoder.decode(await answer.content.readany())
    live.close()
    assert [frame.scn for frame in iter_frames(read)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


async def test_a_client_that_names_no_coding_gets_the_bytes_of_the_ring(tmp_path: Path) -> None:
    live = LiveRelay(tmp_path)
    block = window(1, [(Op.INSERT, ORDERS, 1)])
    live.append(block)
    async with live.served(), raw_session("identity") as http:
        async with http.get(f"{live.url}/v1/shop/stream") as answer:
            assert "Content-Encoding" not in answer.headers
            assert await answer.read() == block
    live.close()
