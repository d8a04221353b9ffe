"""What every test gets: the private servers, paths and processes of tests/support."""

from __future__ import annotations

pytest_plugins = ["tests.support.fixtures"]
