"""Run a verb as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, "-m", "stepscope")


def run_verb(
    *words: object, cwd: Path | None = None, timeout: float = 170, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`environment` stands beside our own; torch takes one thread, to leave others a core."""
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=timeout,
    )
