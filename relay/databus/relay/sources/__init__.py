"""The databases a relay reads; source.py is the contract that each module here keeps."""

from __future__ import annotations
