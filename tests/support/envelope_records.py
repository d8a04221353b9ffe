"""The records of an envelope, as JSON documents that a test compares."""

from __future__ import annotations

import json
from typing import Any

from databus.common.envelopes.json_encoding import JsonEncoding
from databus.common.envelopes.row_change import Envelope, RowChange


def documents_of(envelope: Envelope, change: RowChange) -> list[Any]:
    """[topic, key, value] of each record of a change."""
    encoding = JsonEncoding()
    return [
        [
            one.topic,
            None if one.key_type is None else json.loads(encoding.text(one.key_type, one.key)),
            None
            if one.value_type is None
            else json.loads(encoding.text(one.value_type, one.value)),
        ]
        for one in envelope.records(change)
    ]
