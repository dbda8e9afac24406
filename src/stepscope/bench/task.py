"""One row of a bench: a workload in one size, with some remedies, on so many ranks; and
lists of counts as options have them. Light: the command line loads it at once.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepscope.bench.workload import SIZES, Config, Size, Target, TrainingWorkload
from stepscope.errors import UsageError

# Fewer leave too few steady ones beside the profiler's window and the memory step.
FEWEST_STEPS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTask:
    """What is trained, and how. `changes` are those of --set, as they were typed."""

    workload: TrainingWorkload
    size: Size
    changes: Mapping[str, str] = field(default_factory=dict)
    remedies: tuple[str, ...] = ()
    ranks: int = 1
    steps: int | None = None  # None: as many as the target allows
    seed: int = 0
    in_study: bool = False  # one of several places, which differ in batch or ranks

    @property
    def config(self) -> Config:
        return self.workload.config(self.size, self.changes)

    @property
    def target(self) -> Target:
        return self.workload.targets[self.size]

    @property
    def all_steps(self) -> int:
        return max(self.steps or self.target.steps, FEWEST_STEPS)

    @property
    def samples(self) -> int:
        """That one step of the whole job trains on."""
        return int(self.config.batch) * self.ranks

    @property
    def name(self) -> str:
        """gpt2, gpt2+bf16+fused-optimizer, gpt2 batch=16 ranks=2."""
        name = "+".join((self.workload.name, *self.remedies))
        return f"{name} batch={self.config.batch} ranks={self.ranks}" if self.in_study else name


def check_task(task: BenchTask) -> BenchTask:
    """UsageError for a size or a setting that the workload does not have, or a value it refuses."""
    workload, size = task.workload, task.size
    if size not in workload.sizes:
        has = ", ".join(one for one in SIZES if one in workload.sizes)
        raise UsageError(f"{workload.name} has no size {size}. It has {has}")
    known = workload.sizes[size]
    for name, value in task.changes.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 2, 0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(known)}"
            raise UsageError(f"--set {name}: {workload.name} has no such setting; {hint}")
        _check_value(workload.name, name, value, known[name])
    return task


def _check_value(workload: str, name: str, text: str, usual: object) -> None:
    """A number must be one; lists and switches belong to the size."""
    kind = type(usual)
    if kind not in (int, float, str):
        raise UsageError(f"--set {name}: {workload} sets {usual!r} there, which cannot be changed")
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not _is_possible(name, value, usual):
        raise UsageError(f"--set {name}={text}: {workload} needs a value such as {usual}")


def _is_possible(name: str, value: Any, usual: Any) -> bool:
    """No setting is infinite, none that counts is below zero, and no batch is empty."""
    if isinstance(value, str):
        return True
    return math.isfinite(value) and not (usual > 0 > value) and not (name == "batch" and value < 1)


# Lists of counts, as options have them: 1,2,4.

_MOST = 1 << 20


def parse_counts(text: str, wrong: str) -> tuple[int, ...]:
    """In rising order, each once; UsageError with `wrong` for anything else than whole numbers."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(wrong) from None
    if counts[0] < 1 or counts[-1] > _MOST:
        raise UsageError(wrong)
    return tuple(counts)
