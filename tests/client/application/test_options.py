"""The settings of a client: their names, types and checks."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from databus.client import DatabusClient, Options
from databus.client.application.options import OptionFields
from databus.common.errors import ConfigError


def test_every_option_is_a_typed_keyword_argument() -> None:
    hints = get_type_hints(DatabusClient.__init__)
    assert hints["options"].__args__ == (OptionFields,)
    assert get_type_hints(OptionFields) == get_type_hints(Options)


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    settings: dict[str, Any] = {"database": "shop", "relays": ["http://r"], "checkpoint_evry_s": 1}
    with pytest.raises(ConfigError, match="did you mean checkpoint_every_s"):
        DatabusClient(**settings)
