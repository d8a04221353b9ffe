"""The envelopes by their names."""

from __future__ import annotations

from collections.abc import Callable

from databus.common.envelopes.debezium_envelope import DebeziumEnvelope
from databus.common.envelopes.envelope_options import EnvelopeOptions
from databus.common.envelopes.plain_envelopes import (
    CloudEventsEnvelope,
    DatabusEnvelope,
    FlatEnvelope,
    MaxwellEnvelope,
)
from databus.common.envelopes.row_change import Envelope
from databus.common.errors import ConfigError

_ENVELOPES: dict[str, Callable[[EnvelopeOptions], Envelope]] = {
    "databus": DatabusEnvelope,
    "debezium": DebeziumEnvelope,
    "cloudevents": CloudEventsEnvelope,
    "maxwell": MaxwellEnvelope,
    "flat": FlatEnvelope,
}
ENVELOPES = tuple(_ENVELOPES)


def make_envelope(name: str, options: EnvelopeOptions) -> Envelope:
    """The envelope of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _ENVELOPES:
        raise ConfigError(f"envelope={name!r} is not one of {', '.join(ENVELOPES)}")
    return _ENVELOPES[name](options)
