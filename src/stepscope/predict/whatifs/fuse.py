"""fuse=B: so many models of the same program train as one array (stepscope.fix.fuse)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.replay.schedule import step_ns
from stepscope.predict.declaration import ApplyStage, WhatIf
from stepscope.predict.fused_models import fuse_models
from stepscope.predict.outcome import Outcome, Refused, WrongValue
from stepscope.predict.whatifs import cuda_graphs
from stepscope.records.figures import duration

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

_MOST = 1024
_ALIKE = 1.1  # times a CUDA graph's speed: no reason to fuse


def apply(context: StepContext, value: str) -> Outcome:
    """A step of the array; its samples are those of all models."""
    if not value.isdecimal() or not 2 <= int(value) <= _MOST:
        raise WrongValue(f"fuse={value}: give a number of models from 2 to {_MOST}")
    outcome = fuse_models(context, int(value))
    each_ns = step_ns(outcome.context.graph) / int(value)
    words = f"{duration(each_ns)} for each model's step"
    return replace(
        outcome, assumptions=(words, *outcome.assumptions, *_against_a_graph(context, each_ns))
    )


def _against_a_graph(context: StepContext, each_ns: float) -> tuple[str, ...]:
    """What one model alone would take as a CUDA graph, which is the simpler change."""
    try:
        alone = step_ns(cuda_graphs.apply(context, "").context.graph)
    except Refused:
        return ()
    words = f"one model alone, launched as a CUDA graph, would take {duration(alone)} per step"
    if alone < _ALIKE * each_ns:
        words += ". That is as good as training them together, and simpler"
    return (words,)


WHATIF = WhatIf(
    name="fuse",
    help="train N models of one architecture together, for N times the samples (fuse=8)",
    label="{} models trained together",
    stage=ApplyStage.BATCH,
    apply=apply,
    remedies={"fuse": ("8", "16", "32")},
)
