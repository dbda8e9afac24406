"""processes.jsonl: which Python processes of the job are watched, and how far each of them came.

`run` reads it to say, while the job runs, what was attached and what is missing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from stepscope.measure.folder import PROCESSES
from stepscope.measure.never_raise import never_raise
from stepscope.measure.writer import append_lines

STARTED, TORCH, BACKWARD, STEP = "started", "torch", "backward", "step"
_LONGEST = 400  # characters of a command line


@never_raise
def record(folder: str, event: str) -> None:
    """One line, in one write: many processes share the file."""
    line = {
        "event": event,
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "unix": time.time(),
        "command": " ".join(sys.orig_argv)[:_LONGEST],
    }
    append_lines(Path(folder) / PROCESSES, [json.dumps(line)])
