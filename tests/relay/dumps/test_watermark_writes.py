"""Watermark rows: what the stream may show of them, and what fails a dump."""

from __future__ import annotations

import pytest

from databus.relay.dumps.watermark_writes import WatermarkWrite, WatermarkWrites


def watermark_writes() -> WatermarkWrites:
    return WatermarkWrites("dump", "run", {"dump", "older"}.__contains__)


def test_a_bracket_closes_with_its_high_token_after_its_low_one() -> None:
    all_ = watermark_writes()
    first, second = all_.begin(), all_.begin()
    for token in (first.low, second.low, second.high, first.high):
        assert not first.is_closed
        all_.streamed(token)
        assert not all_.violation
    assert first.is_closed
    assert second.is_closed


def test_what_an_earlier_run_of_a_known_dump_has_left_is_passed_over() -> None:
    all_ = watermark_writes()
    watermark_write = all_.begin()
    for token in (
        watermark_write.low,
        "older:run:0:high",
        "dump:another:7:high",
        watermark_write.high,
    ):
        all_.streamed(token)
    assert (all_.violation, watermark_write.is_closed) == ("", True)


@pytest.mark.parametrize(
    ("shown", "named"),
    [
        (["high"], "before its low one"),
        (["low", "low"], "streamed twice"),
        (["low", "high", "high"], "streamed twice"),
        (["low", "high", "low"], "streamed twice"),
        (["low", None], "deleted"),
        (["low", ""], "another program"),
        (["low", "hello"], "another program"),
        (["low", "dump:run:x:high"], "another program"),
        (["low", "unknown:run:0:high"], "unknown here"),
        (["low", "dump:run:99:high"], "never written"),
    ],
)
def test_a_missing_doubled_reversed_or_foreign_token_fails_for_good(
    shown: list[str | None], named: str
) -> None:
    all_ = watermark_writes()
    watermark_write = all_.begin()
    for token in shown:
        all_.streamed(_token(watermark_write, token))
    assert named in all_.violation
    before = all_.violation
    for token in ("low", "high"):
        all_.streamed(_token(watermark_write, token))
    assert all_.violation == before


def _token(watermark_write: WatermarkWrite, token: str | None) -> str | None:
    return {"low": watermark_write.low, "high": watermark_write.high}.get(token or "", token)
