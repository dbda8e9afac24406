"""DDP's buckets, tuned on the first steps of the run itself: fix/ddp/bucket_tuner.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.remedies.ddp import why_no_ddp
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.ddp.bucket_tuner import BucketTuner
    from stepscope.fix.training_process import TrainingProcess


def fits(facts: ScriptFacts, value: str) -> str | None:
    return why_no_ddp(facts) or (
        "it tries bucket sizes within one run, which takes longer than a trial. Use "
        "`stepscope run --with tuned-buckets`"
    )


def apply(training: TrainingProcess, value: str) -> None:
    """One DDP after the other, on the steps of an optimizer that holds its parameters."""
    tell, refuse = training.telling(), training.refusing()
    waiting: list[Any] = []
    tuned: list[tuple[BucketTuner, set[int]]] = []
    counted: dict[int, int] = {}  # tuner -> the optimizer whose steps count

    def begin(_root: Any) -> None:
        from stepscope.errors import UsageError
        from stepscope.fix.ddp.bucket_tuner import MOST_STEPS, tune_buckets

        while waiting:
            ddp = waiting.pop(0)
            try:
                tuner = tune_buckets(ddp)
            except UsageError as error:
                refuse(str(error))
            else:
                tell(
                    f"{type(ddp).__name__}: bucket sizes are tried in its first {MOST_STEPS} steps"
                )
                tuned.append((tuner, {id(parameter) for parameter in ddp.parameters()}))

    def count(optimizer: Any) -> None:
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for tuner, parameters in tuned[:1]:
            if not held & parameters:
                continue
            if counted.setdefault(id(tuner), id(optimizer)) != id(optimizer):
                continue
            tuner.step()
            if tuner.result is not None:
                tell(tuner.result.verdict)
                tuned.pop(0)

    training.after_building("ddp", lambda made: waiting.append(made.object))
    training.when_root(begin)
    training.after_step(count)


def patch(script: Script, value: str) -> Proposal:
    return Proposal(
        by_hand=(
            "after the model is wrapped and the optimizer is built: from stepscope.fix.ddp "
            "import tune_buckets; tune_buckets(model, optimizer)",
        )
    )


FIX = Fix(fits=fits, apply=apply, patch=patch)
