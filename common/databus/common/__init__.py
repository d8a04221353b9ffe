"""What the rooms share: frames, schemas, checkpoints, filters, errors, configuration.

Each module is imported by its own name (``from databus.common import frame``).
"""

from __future__ import annotations

__all__: list[str] = []
