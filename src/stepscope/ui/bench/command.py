"""The command that trains one row of a bench: an ordinary script, as a user would start it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.ui.own_python import own_python, own_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.bench.task import BenchTask

_MODULE = "stepscope.bench.train"


def training_command(
    task: BenchTask, losses: Path, paced_s: float | None = None
) -> tuple[str, ...]:
    """`losses` is where it writes the loss of every step; a paced run, its ratio."""
    changes = (f"--set={name}={value}" for name, value in task.changes.items())
    arguments = (
        task.workload.name,
        f"--size={task.size}",
        f"--steps={task.all_steps}",
        f"--seed={task.seed}",
        f"--losses={losses}",
        *((f"--paced={paced_s}",) if paced_s else ()),
        *changes,
    )
    if task.ranks > 1:
        return tuple(own_ranks(task.ranks, _MODULE, *arguments))
    return tuple(own_python(_MODULE, *arguments))
