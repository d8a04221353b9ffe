"""JSON from a peer: bounded, and whatever it is, a value or one clear error."""

from __future__ import annotations

import json
from typing import Any

from databus.common.errors import BadRequest, DatabusError


def read_json(body: bytes, what: str, error: type[DatabusError] = BadRequest) -> Any:
    """The JSON value in ``body``; ``what`` is what the error calls it.

    Raises:
        DatabusError: of the class ``error``: it is none, or it is nested too deep.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise error(f"{what} is not JSON that we read: it is nested too deep") from None
    except ValueError as problem:
        raise error(f"{what} is not JSON: {problem}") from None
