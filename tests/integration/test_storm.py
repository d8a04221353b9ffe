"""A short storm with a fixed seed over each server: rows, transactions and sessions, compared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from databus.common.errors import MissingDependency
from tests.storm.storm import Storm, told

SECONDS = float(os.environ.get("DATABUS_STORM_SECONDS", "0"))
"""For each server; as long as the storm finds differences that are not fixed, it is asked for."""
SEED = int(os.environ.get("DATABUS_STORM_SEED", "1"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not SECONDS, reason="DATABUS_STORM_SECONDS is not set"),
]


@pytest.mark.parametrize("product", ["mariadb", "mysql", "postgres", "sqlite"])
def test_followed_tables_equal_the_source_after_statements_at_random(
    product: str, tmp_path: Path
) -> None:
    if os.environ.get("DATABUS_TEST_SKIP_SERVERS") == "1" and product != "sqlite":
        pytest.skip("DATABUS_TEST_SKIP_SERVERS=1")
    try:
        storm = Storm(product, tmp_path, tmp_path / "kept")
    except MissingDependency as error:
        pytest.skip(error.message)
    with storm:
        storm.restarts, storm.most_failures = False, 1
        storm.run(SEED, SECONDS, 80)
        print(storm.report())
    assert not storm.failures, told(storm.failures[0])
    assert storm.tally.comparisons.total() > 20
    assert storm.tally.successes["insert"] or storm.tally.successes["transaction"]
