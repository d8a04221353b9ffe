"""What a reader of the ring takes for each table's definition."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from databus.relay.capture.intake import Intake
from databus.relay.ring.ring import Ring
from databus.relay.sources.contract import Batch
from tests.relay.capture.test_intake import first_frames, frames, opened

_ID = Column("id", Kind.INT, False)
OLD = SourceSchema("shop.t", (_ID,), ("id",))
NEW = SourceSchema("shop.t", (_ID, Column("v", Kind.INT, True)), ("id",))


@pytest.fixture
def intake(tmp_path: Path) -> Iterator[Intake]:
    made = opened(tmp_path)
    yield made
    made.ring.close()


def window(scn: int, schema: SourceSchema, *, announces: bool = False, events: int = 1) -> bytes:
    builder = WindowBuilder(scn, scn)
    if announces:
        document = json.dumps(schema.to_json()).encode()
        builder.control(
            Op.SCHEMA_CHANGE, source=schema.source_id, schema_fp=schema.fingerprint, after=document
        )
    for number in range(events):
        builder.event(Op.INSERT, schema.source_id, schema.fingerprint, b"%d" % number, after=b"x")
    return builder.end()


def take(intake: Intake, data: bytes, *schemas: SourceSchema) -> bool:
    intake.take(Batch(data, schemas))
    return intake.announce_due()


def definition(intake: Intake) -> SourceSchema | None:
    """What a reader has that registers now and then reads the ring from its oldest frame."""
    known = SchemaSet(intake.registry.schemas)
    for view in frames(intake):
        if view.op == Op.SCHEMA_CHANGE:
            known.announce(SourceSchema.from_json(json.loads(bytes(view.after or b""))))
    return known.latest("shop.t")


def changes(intake: Intake) -> int:
    return sum(view.op == Op.SCHEMA_CHANGE for view in frames(intake))


def test_a_definition_that_only_rows_have_is_announced_behind_their_window(intake: Intake) -> None:
    take(intake, window(11, OLD, announces=True, events=0), OLD)
    assert not take(intake, first_frames(window(12, NEW, events=2), 1), NEW), "a window is open"
    assert take(intake, window(12, NEW, events=2))
    assert frames(intake)[-2].op == Op.SCHEMA_CHANGE
    assert not take(intake, window(13, NEW))
    assert definition(intake) == NEW


def test_a_definition_that_the_source_announces_is_not_announced_again(intake: Intake) -> None:
    take(intake, window(11, OLD), OLD)
    assert changes(intake) == 0, "a table of one version"
    take(intake, window(12, NEW, announces=True), NEW)
    take(intake, window(13, NEW) + window(14, OLD, announces=True) + window(15, OLD), OLD)
    assert changes(intake) == 2
    assert definition(intake) == OLD


def test_rows_that_were_read_announce_a_definition_that_the_stream_has_not(intake: Intake) -> None:
    take(intake, window(11, OLD, announces=True), OLD)
    before = intake.definitions.of("shop.t")
    intake.come_to(NEW, before)
    intake.come_to(NEW, before)  # the chunk's second part
    assert changes(intake) == 2
    assert definition(intake) == NEW
    # The source has not announced NEW, so it does not announce OLD again.
    assert take(intake, window(12, OLD))
    assert definition(intake) == OLD


def test_rows_that_were_read_before_a_change_do_not_bring_the_old_definition_back(
    intake: Intake,
) -> None:
    take(intake, window(11, OLD, announces=True), OLD)
    before = intake.definitions.of("shop.t")
    take(intake, window(12, NEW, announces=True), NEW)
    intake.come_to(OLD, before)
    assert intake.registry.schemas.latest("shop.t") == NEW
    assert definition(intake) == NEW


def test_after_a_restart_a_definition_of_several_is_announced_with_its_next_row(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path)
    take(first, window(11, OLD, announces=True), OLD)
    first.take(Batch(window(12, NEW), (NEW,)))  # A kill comes before it is announced.
    first.ring.close()
    again = opened(tmp_path)
    again.resume()
    assert take(again, window(13, NEW), NEW)
    assert definition(again) == NEW
    with Ring.open_reader(tmp_path) as reader:
        assert reader.snapshot().max == again.complete
    again.ring.close()
