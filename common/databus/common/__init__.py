"""What all rooms share.  It imports no other room.

In reading order: ``errors`` (the tree of errors), ``checkpoint`` (positions and checkpoints),
``table_state`` (followed, suspended, resynchronising), ``config`` (the TOML file) with
``s3_config``, ``sink_config`` and ``config_values``, ``private`` (passwords in texts, modes of
files), ``extras`` (whether the packages of an extra are installed), ``spelling`` (the nearest known
name), ``json_text`` (values as JSON), ``loopback`` (whether a host is this machine). Then the
folders ``compiled``, ``frame``, ``schema``, ``filters``, ``envelopes``, ``http``, ``storage`` and
``processes``.

Each module is imported by its own name (``from databus.common.frame import frame_format``).
"""

from __future__ import annotations

__all__: list[str] = []
