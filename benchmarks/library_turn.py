"""Run a training script whose turn on the device comes when no other such script has it.

    python benchmarks/library_turn.py LOCK SCRIPT [ARGUMENTS]

Several tunes can then share a machine: they start Python and import beside each other, and train
one after the other. The turn begins where the script seeds its random numbers, before it builds
anything, and ends with the process.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    lock, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).absolute().parent)
    seed = torch.manual_seed

    def wait_and_seed(number: int) -> Any:
        torch.manual_seed = seed
        # Stays open: the process's end ends the turn.
        fcntl.flock(os.open(lock, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
        return seed(number)

    torch.manual_seed = wait_and_seed
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
