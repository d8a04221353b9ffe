"""JSON with the fast library and without it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common import json_text

_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | _FLOATS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("is_fast", [True, False])
@given(value=_VALUES)
def test_a_value_comes_back_whatever_its_numbers_and_letters(value: Any, is_fast: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not is_fast:
            patch.setattr(json_text, "_fast", None)
        text = json_text.json_text(value)
        assert json.loads(text) == value
        assert "\n" not in text
        assert json_text.json_bytes(value) == text.encode()


def test_half_of_a_surrogate_pair_and_a_long_number_are_text() -> None:
    value = {"error": "\ud800", "n": 1 << 70}
    assert json.loads(json_text.json_text(value)) == value
