"""What every test gets: the private servers, paths and processes of tests/support."""

from __future__ import annotations

import hypothesis

pytest_plugins = ["tests.support.fixtures"]

# A single example may meet the first call of a compiled kernel: the time-out of the whole test
# is what bounds it.
hypothesis.settings.register_profile("databus", deadline=None, print_blob=True)
hypothesis.settings.load_profile("databus")
