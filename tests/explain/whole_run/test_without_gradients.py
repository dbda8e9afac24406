"""Time without gradients is evaluation only where the sampled stacks do not say otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.findings.loop import evaluation_share
from stepscope.explain.whole_run.outside_model import (
    name_time_without_gradients,
    name_unknown_stalls,
)
from stepscope.explain.whole_run.rank_run import explain_run
from stepscope.records.run import RunTimes
from stepscope.records.source_lines import Place, StackSamples

from .columns import MS, columns

MAIN = Place(file="/home/me/train.py", line=90, function="main")
LOADER = Place(file="/x/site-packages/torch/utils/data/dataloader.py", line=7, function="__next__")


def own(function: str, file: str = "/home/me/train.py") -> Place:
    return Place(file=file, line=5, function=function)


@pytest.mark.parametrize(
    ("inner", "kind"),
    [
        ([own("validate")], "evaluation"),
        ([own("Trainer.evaluation_loop"), own("ToyEnv.step")], "evaluation"),
        ([LOADER], "evaluation"),
        ([own("PPO.collect_rollouts"), own("Policy.forward")], "collecting"),
        ([own("ToyEnv.step")], "collecting"),
        ([own("step", "/x/site-packages/gymnasium/core.py")], "collecting"),
        ([own("sample_action")], "collecting"),
        ([own("GaussianDiffusion.p_sample")], "generating"),
        ([own("generate")], "generating"),
        ([own("forward")], "without_gradients"),
        ([], "without_gradients"),
    ],
)
def test_the_functions_that_ran_say_what_it_was(inner: list[Place], kind: str) -> None:
    spent = [40 if step % 10 == 9 else 0 for step in range(100)]
    steps = columns([10 + away for away in spent], evaluation=spent)
    numbers = [step for step in range(100) for _ in range(5 if spent[step] else 1)]
    samples = StackSamples(
        stacks=((MAIN, *inner), (MAIN, own("learn"))),
        number=np.array(numbers, np.int64),
        stack=np.array([0 if spent[step] else 1 for step in numbers], np.int64),
    )
    times = RunTimes(began_ns=0, ended_ns=int(steps.end_unix_ns[-1]) + MS)
    run = name_time_without_gradients(explain_run(steps, times=times), samples, steps)
    assert run.account is not None
    assert [part.id for part in run.account.parts if part.ms > 300] == ["training", kind]
    assert run.account.wall_ms == pytest.approx(sum(part.ms for part in run.account.parts))
    assert kind in {stall.cause for stall in run.stalls}
    finding = evaluation_share.judge(run)
    assert finding is not None
    assert ("valuation" in finding.title + finding.summary) is (kind == "evaluation")


def test_without_samples_a_model_in_evaluation_mode_evaluates() -> None:
    steps = columns([10, 10, 10, 50], evaluation=[0, 0, 0, 40])
    nothing = np.array([], np.int64)
    samples = StackSamples(stacks=(), number=nothing, stack=nothing)
    run = explain_run(steps)
    assert name_time_without_gradients(run, samples, steps) is run


GYM = Place(file="/x/site-packages/gymnasium/core.py", line=7, function="Wrapper.step")
ROLLOUT = Place(file="/home/me/train.py", line=12, function="main")


@pytest.mark.parametrize(
    ("stack", "kind", "where"),
    [
        ((MAIN, own("collect")), "collecting", own("collect")),
        ((ROLLOUT, GYM), "collecting", ROLLOUT),
        ((MAIN, own("validate")), "evaluation", own("validate")),
        ((MAIN, own("plot")), "unknown", None),
    ],
)
def test_long_steps_with_gradients_are_named_by_what_only_they_run(
    stack: tuple[Place, ...], kind: str, where: Place | None
) -> None:
    steps = columns([50 if step % 10 == 9 else 10 for step in range(100)])
    numbers = [step for step in range(100) for _ in range(5 if step % 10 == 9 else 1)]
    seen = [number % 10 == 9 and place % 2 for place, number in enumerate(numbers)]
    samples = StackSamples(
        stacks=(stack, (MAIN, own("learn"))),
        number=np.array(numbers, np.int64),
        stack=np.where(seen, 0, 1),
    )
    run = name_unknown_stalls(explain_run(steps), samples)
    (stall,) = run.stalls
    assert stall.cause == kind
    assert where is None or stall.where[0] == where
    finding = evaluation_share.judge(run)
    if kind == "collecting":
        assert finding is not None
        assert finding.title == "Collecting experience"
        assert finding.summary.endswith(": 40.0 ms every 10 steps.")


CALL = Place(file="/x/site-packages/torch/nn/modules/module.py", line=1, function="_call_impl")
ACTS = Place(file="/home/me/train.py", line=98, function="main")


@pytest.mark.parametrize(
    ("environments", "typical", "kind"),
    [
        (("gymnasium",), own("learn"), "collecting"),
        ((), own("learn"), "unknown"),  # what acts then is not known
        (("gymnasium",), CALL, "unknown"),  # typical steps run the model as much
    ],
)
def test_with_a_quick_environment_steps_that_only_run_the_model_collect(
    environments: tuple[str, ...], typical: Place, kind: str
) -> None:
    steps = columns([50 if step % 10 == 9 else 10 for step in range(100)])
    numbers = [step for step in range(100) for _ in range(5 if step % 10 == 9 else 1)]
    samples = StackSamples(
        stacks=((ACTS, CALL), (MAIN, typical)),
        number=np.array(numbers, np.int64),
        stack=np.where(np.array(numbers) % 10 == 9, 0, 1),
        environments=environments,
    )
    (stall,) = name_unknown_stalls(explain_run(steps), samples).stalls
    assert stall.cause == kind
    assert kind == "unknown" or stall.where == (ACTS,)
