"""Paths between `serve` and its worker: names may hold any bytes, so they travel as digits."""

from __future__ import annotations

import os
from pathlib import Path


def path_of(text: str) -> Path:
    return Path(os.fsdecode(bytes.fromhex(text)))


def text_of(path: Path) -> str:
    return os.fsencode(path).hex()
