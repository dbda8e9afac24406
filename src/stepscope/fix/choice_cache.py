"""Choices that were measured, kept between runs: one small file for each device and torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

import torch

from stepscope.records.folders import user_folder

_SCHEMA = 1
_MOST_BYTES = 4 << 20


class ChoiceCache:
    """By key: the fastest way, in words. A damaged file counts as none; it is written anew."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._choices: dict[str, str] | None = None

    @classmethod
    def of_device(cls, what: str, device: torch.device) -> ChoiceCache:
        name = "cpu"
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        folder = user_folder("STEPSCOPE_CACHE_DIR", "", "XDG_CACHE_HOME", "~/.cache")
        return cls(folder / f"{what}-{_for_file(name)}-torch-{_for_file(torch.__version__)}.json")

    def get(self, key: str) -> str | None:
        if self._choices is None:
            self._choices = self._read()
        return self._choices.get(key)

    def put(self, key: str, way: str) -> None:
        """What another process wrote meanwhile stays."""
        self._choices = {**self._read(), **(self._choices or {}), key: way}
        part = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # a full disk costs a measurement, not the training
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = {"schema": _SCHEMA, "choices": self._choices}
            part.write_text(json.dumps(content, indent=1, sort_keys=True))
            part.replace(self._file)

    def _read(self) -> dict[str, str]:
        try:
            if not self._file.is_file() or self._file.stat().st_size > _MOST_BYTES:
                return {}
            content = json.loads(self._file.read_text())
            choices = content["choices"] if content["schema"] == _SCHEMA else {}
            return {key: way for key, way in choices.items() if isinstance(way, str)}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}


def _for_file(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)
