"""The names of a job's hosts, and of the files about them in its run folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HOSTS = "hosts"  # the folder
COLLECTOR = ".collector"  # in it: where the first host's `stepscope run --collect` listens
_PROCESSES = ".processes.jsonl"


def this_host() -> str:
    return os.uname().nodename


def processes_file(run: Path, host: str) -> Path:
    """How far each Python process of a host came. Hosts that share a disk append to no common file:
    network file systems lose lines of it."""
    return run / HOSTS / f"{host}{_PROCESSES}"


def processes_files(run: Path, most: int) -> list[Path]:
    """Those of this host and of some others."""
    own = processes_file(run, this_host())
    try:
        names = sorted(name for name in os.listdir(run / HOSTS) if name.endswith(_PROCESSES))  # noqa: PTH208
    except OSError:
        names = []
    return list(dict.fromkeys([own, *(run / HOSTS / name for name in names)]))[:most]
