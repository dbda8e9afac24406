"""What typical steps do outside the model, by sampled stacks: environments, lists, numpy, logging.

torch.compile, fused optimizers and larger layers do not reach this time, so the lines are named.
Time in a data loader, in backward or in an optimizer, and time in a module's forward is not part
of it. A tensor operator that the user's own line calls outside any module is: the stacks do not
tell it from Python.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.whole_run.stall_stacks import (
    TYPICAL,
    is_library_frame,
    kinds_of_steps,
    line_of,
)
from stepscope.records.whole_run import OwnLine, OwnPython

if TYPE_CHECKING:
    from stepscope.records.place import Place
    from stepscope.records.stack_samples import StackSamples
    from stepscope.records.whole_run import StepSeries

FEWEST_SAMPLES = 40  # in typical steps: a share is then known to 15 points at worst
_LEAST_SHARE = 0.05  # of a step, for a line to be named
_MOST_LINES = 3
_NORMAL_95 = 1.96
_TORCH = re.compile(r"[/\\]torch[/\\]")
# Whatever runs inside these belongs to a part of the step with findings of its own.
_PARTS = re.compile(
    r"[/\\]torch[/\\](?:utils[/\\]data|optim|autograd|nn[/\\]modules|_dynamo|_inductor)[/\\]"
)
_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")


def find_own_python(samples: StackSamples, series: StepSeries) -> OwnPython | None:
    """None with too few samples in typical steps."""
    chosen = np.isin(samples.number, series.number[kinds_of_steps(series) == TYPICAL])
    total = int(chosen.sum())
    if total < FEWEST_SAMPLES:
        return None
    counts = np.bincount(samples.stack[chosen], minlength=len(samples.stacks))
    lines: Counter[tuple[Place, str]] = Counter()
    for stack, count in zip(samples.stacks, counts.tolist(), strict=True):
        if count and is_own_python(stack):
            lines[_line_and_package(stack)] += count
    share = lines.total() / total
    doubt = _NORMAL_95 * math.sqrt((share * (1 - share) + 1 / total) / total)
    named = (
        OwnLine(place=place, share=count / total, package=package)
        for (place, package), count in lines.most_common(_MOST_LINES)
        if count >= _LEAST_SHARE * total
    )
    return OwnPython(
        share=share,
        low=max(0.0, share - doubt),
        high=min(1.0, share + doubt),
        samples=total,
        lines=tuple(named),
    )


def is_own_python(stack: tuple[Place, ...]) -> bool:
    """Whether no part of torch ran and no module's forward pass, and a line of the user's did."""
    return (
        bool(stack)
        and not _TORCH.search(stack[-1].file)
        and not any(_PARTS.search(frame.file) for frame in stack)
        and not all(map(is_library_frame, stack))
    )


def _line_and_package(stack: tuple[Place, ...]) -> tuple[Place, str]:
    """The innermost line of the user's; the library that it called, if one ran."""
    line = line_of(stack)
    if not is_library_frame(stack[-1]):
        return line, ""
    inner = stack[len(stack) - stack[::-1].index(line) :]
    packages = (match[1] for frame in inner if (match := _PACKAGE.search(frame.file)))
    return line, next(packages, "")
