"""The ``options`` of a ``[[database]]``: a pydantic model for each source, read in one way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic
from pydantic import ConfigDict

from databus.common.config import DatabaseConfig
from databus.common.errors import ConfigError
from databus.common.spelling import spelling_advice


class SourceOptions(pydantic.BaseModel):
    """The ``options`` that a source accepts; the string under a field describes it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", coerce_numbers_to_str=True, use_attribute_docstrings=True
    )


_O = TypeVar("_O", bound=SourceOptions)


def read_options(
    config: DatabaseConfig, kind: type[_O], given: Mapping[str, Any] | None = None
) -> _O:
    """The options of a database, or those that are ``given``, as the source's model.

    Raises:
        ConfigError: an option is unknown or has a wrong value; the message names the option and
            the values that it takes.
    """
    try:
        return kind.model_validate(dict(config.options if given is None else given))
    except pydantic.ValidationError as error:
        items = error.errors()
        first = next((item for item in items if item["type"] == "extra_forbidden"), items[0])
        raise ConfigError(f"database {config.name}: {_problem(kind, first)}") from None


def _problem(kind: type[SourceOptions], item: Any) -> str:
    option, value = ".".join(map(str, item["loc"])), item["input"]
    if item["type"] == "extra_forbidden":
        known = list(kind.model_fields)
        advice = spelling_advice(option, known) if known else "this source has no options"
        return f"unknown option {option!r}; {advice}"
    if item["type"] == "literal_error":
        takes = item["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        return f"{option} is {value!r}; it takes {takes}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{option}: {message}" if option else message
    return f"{option} is {value!r}: {message[:1].lower()}{message[1:]}"
