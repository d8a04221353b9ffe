"""One Spark session for the tests of a file: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from databus.client.spark import register
from tests.support.spark_session import spark_session


# Not for the folder: that would last to the end of the process, in which others start Spark too.
@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session with the format ``databus``."""
    with spark_session(tmp_path_factory.mktemp("scratch")) as session:
        register(session)
        session.conf.set("spark.sql.shuffle.partitions", "2")
        yield session
