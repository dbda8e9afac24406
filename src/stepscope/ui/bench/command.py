"""The command that trains one row of a bench: an ordinary script, as a user would start it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.bench.task import BenchTask

_MODULE = "stepscope.bench.train"


def training_command(
    task: BenchTask, losses: Path, paced_s: float | None = None
) -> tuple[str, ...]:
    """`losses` is where it writes the loss of every step; a paced run, its ratio."""
    launcher: tuple[str, ...] = (sys.executable,)
    if task.ranks > 1:
        launcher += ("-m", "torch.distributed.run", "--standalone")
        launcher += (f"--nproc-per-node={task.ranks}",)
    changes = (f"--set={name}={value}" for name, value in task.changes.items())
    return (
        *launcher,
        *("-m", _MODULE, task.workload.name),
        f"--size={task.size}",
        f"--steps={task.all_steps}",
        f"--seed={task.seed}",
        f"--losses={losses}",
        *((f"--paced={paced_s}",) if paced_s else ()),
        *changes,
    )
