"""Which Python processes of the job are watched, and how far each of them came: a file per host.

`run` reads it to say, while the job runs, what was attached and what is missing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import time  # a script may replace that of the module
from typing import Any

from stepscope.measure.never_raise import never_raise
from stepscope.measure.writer import append_lines
from stepscope.records.host_names import processes_file, this_host

STARTED, TORCH, BACKWARD, STEP = "started", "torch", "backward", "step"
FORKED = "forked"  # a process forked from a watched one trains: it is not captured
FAILED = "failed"  # an exception ended the process
_LONGEST = 400  # characters of a command line


@never_raise
def record(folder: str, event: str, **facts: Any) -> None:
    """One line, in one write: many processes share the file."""
    line = {
        "event": event,
        "pid": os.getpid(),
        "host": this_host(),
        "unix": time(),
        "command": " ".join(sys.orig_argv)[:_LONGEST],
        **facts,
    }
    file = processes_file(Path(folder), this_host())
    try:
        append_lines(file, [json.dumps(line)])
    except FileNotFoundError:  # the first process of a host that does not share the disk
        file.parent.mkdir(parents=True, exist_ok=True)
        append_lines(file, [json.dumps(line)])
