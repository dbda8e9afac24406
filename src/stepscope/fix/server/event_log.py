"""The files that a server's processes write into the run folder. They never disturb training."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from stepscope.records.together import event_line
from stepscope.records.together_folder import FOLDER, SERVER_FILE

if TYPE_CHECKING:
    from stepscope.records.together import ServerEvent, ServerFacts

_CAPTURE = "STEPSCOPE_CAPTURE"  # what `stepscope run` hands down


def run_folder() -> str | None:
    """The folder of the `stepscope run` that this process belongs to."""
    try:
        return str(json.loads(os.environ.get(_CAPTURE, ""))["folder"])
    except (ValueError, KeyError, TypeError):
        return None


class EventLog:
    """One process's file under together/; without a folder nothing is written."""

    def __init__(self, folder: str | None, name: str) -> None:
        self._file: TextIO | None = None
        if folder is None:
            return
        try:
            Path(folder, FOLDER).mkdir(parents=True, exist_ok=True)
            path = Path(folder, FOLDER, name)
            self._file = path.open("w", buffering=1, encoding="utf-8")
        except OSError as error:
            _say_once(f"{folder}: events of the parameter server cannot be written: {error}")

    def write(self, event: ServerEvent) -> None:
        if self._file is None:
            return
        try:
            self._file.write(event_line(event))
        except (OSError, ValueError) as error:
            _say_once(f"{self._file.name}: writing stopped: {error}")
            self._file = None

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def write_facts(folder: str | None, facts: ServerFacts) -> None:
    if folder is None:
        return
    try:
        Path(folder, FOLDER).mkdir(parents=True, exist_ok=True)
        Path(folder, FOLDER, SERVER_FILE).write_text(json.dumps(asdict(facts)), encoding="utf-8")
    except OSError as error:
        _say_once(f"{folder}: facts of the parameter server cannot be written: {error}")


def _say_once(text: str) -> None:
    sys.stderr.write(f"stepscope: {text}\n")
