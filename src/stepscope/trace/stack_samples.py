"""samples.json: the stacks that the sampler saw outside windows, and in which step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from stepscope.records.limits import StepNumber  # noqa: TC001  (decoded)
from stepscope.records.place import Place
from stepscope.records.stack_samples import StackSamples
from stepscope.trace.decode import Oddities
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.quality import Note

SAMPLES = "samples.json"
_MAX_BYTES = 64 << 20  # 5,000 stacks of 96 frames, with long paths
_Line = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Row = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class _SampledStack(msgspec.Struct, frozen=True):
    frames: tuple[tuple[str, _Line, str], ...]


class _SampledStepColumns(msgspec.Struct, frozen=True):
    number: list[StepNumber]
    stack: list[_Row]


class _SamplesFile(msgspec.Struct, frozen=True):
    stacks: list[_SampledStack] = []
    environments: list[str] = []
    steps: _SampledStepColumns | None = None  # older captures do not know the steps


def read_stack_samples(folder: Path) -> tuple[StackSamples | None, tuple[Note, ...]]:
    """Of a rank's folder; None where stacks were not sampled or their steps are not known."""
    oddities = Oddities(SAMPLES)
    file = read_record(folder / SAMPLES, _SamplesFile, oddities, _MAX_BYTES)
    if file is None or file.steps is None:
        return None, oddities.notes
    number, stack = np.array(file.steps.number, np.int64), np.array(file.steps.stack, np.int64)
    # A stack or a sample that was left out moves all that follow it.
    if oddities.count or len(number) != len(stack) or (stack >= len(file.stacks)).any():
        oddities.unread("its samples do not fit its stacks")
        return None, oddities.notes
    stacks = tuple(
        tuple(Place(file=name, line=line, function=function) for name, line, function in one.frames)
        for one in file.stacks
    )
    samples = StackSamples(
        stacks=stacks, number=number, stack=stack, environments=tuple(file.environments)
    )
    return samples, oddities.notes
