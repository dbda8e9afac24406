"""Every workload, tiny, in a real process under capture, held against a bare training in this one.

What must be equal: the number of steps, every loss to the bit, the FLOPs of the traced steps (by
torch's own counter), and the parts of the budget to the step.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import stepscope
from stepscope.bench.catalogue import load, names
from stepscope.bench.workload import TrainingPlace
from stepscope.measure.settings import Settings
from stepscope.measure.steps.step_times import Anchor
from stepscope.ui.jobs.capture import capture_to_end

torch = pytest.importorskip("torch", reason="trains")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stepscope.bench.workload import Step
    from stepscope.records.explanation import Explanation

IN_EVERY_RUN = ("gpt2", "nmt-lstm", "dcgan")  # attention, recurrence, two optimizers
WAIT, WARMUP, ACTIVE, STEPS = 4, 1, 2, 9
TRACED = range(WAIT + WARMUP, WAIT + WARMUP + ACTIVE)


@dataclass(frozen=True, kw_only=True)
class BareTraining:
    losses: list[float]
    captured_steps: int  # by the rule for optimizers that take turns


@dataclass(frozen=True, kw_only=True)
class CapturedTraining:
    name: str
    bare: BareTraining
    steps: int
    losses: list[float]
    explanation: Explanation


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow)
        for name in names()
    ],
    scope="module",
)
def captured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CapturedTraining]:
    """One thread, here and there: sums of several threads have no fixed order."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setenv("STEPSCOPE_PROFILES", str(folder / "profiles"))
            yield capture(name, folder, train_bare(name))
    finally:
        torch.set_num_threads(threads)


def train_bare(name: str) -> BareTraining:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    anchor, ended = Anchor(), []

    def stepped(optimizer: Any, *_: Any) -> None:
        ended.append(anchor.ends_steps(optimizer))

    hook = register_optimizer_step_post_hook(stepped)
    step = build(name)
    losses = [step(number).item() for number in range(STEPS)]
    hook.remove()
    return BareTraining(losses=losses, captured_steps=sum(ended))


def capture(name: str, folder: Path, bare: BareTraining) -> CapturedTraining:
    command = [sys.executable, "-m", "stepscope.bench.train", name, "--size", "tiny"]
    command += ["--device", "cpu", "--steps", str(STEPS), "--losses", str(folder / "losses.json")]
    per_step = bare.captured_steps // STEPS
    settings = Settings(
        folder=str(folder / "run"),
        wait=WAIT * per_step,
        warmup=WARMUP * per_step,
        active=ACTIVE * per_step,
        sample_hz=0,
    )
    end, ranks = capture_to_end(command, folder / "run", settings)
    assert end.code == 0, (folder / "run/output.txt").read_text()
    return CapturedTraining(
        name=name,
        bare=bare,
        steps=ranks[0]["steps"],
        losses=json.loads((folder / "losses.json").read_text())["losses"],
        explanation=stepscope.explain(folder / "run", cache=False),
    )


def build(name: str) -> Step:
    torch.manual_seed(0)
    workload = load(name)
    return workload.build(workload.config("tiny"), TrainingPlace(torch.device("cpu")))


def test_every_step_is_counted(captured: CapturedTraining) -> None:
    assert captured.steps == captured.bare.captured_steps
    assert captured.steps % STEPS == 0


def test_losses_are_those_of_a_bare_training_to_the_bit(captured: CapturedTraining) -> None:
    assert captured.losses == captured.bare.losses


def test_flops_of_the_traced_steps_equal_torchs_counter(captured: CapturedTraining) -> None:
    from torchs_flops import count_flops

    step = build(captured.name)
    for number in range(TRACED.start):
        step(number)
    counted = sum(count_flops(step, TRACED)) / len(TRACED)
    efficiency = captured.explanation.ranks[0].efficiency
    assert efficiency is not None
    ours = efficiency.model_flops * captured.steps / STEPS
    assert ours == pytest.approx(counted, rel=0.01)


def test_the_budget_adds_up_to_the_step(captured: CapturedTraining) -> None:
    budget = captured.explanation.budget
    assert budget.step_ms > 0
    assert sum(part.ms for part in budget.parts) == pytest.approx(budget.step_ms, rel=1e-6)
    assert sum(part.share for part in budget.parts) == pytest.approx(1.0, rel=1e-6)


def test_there_is_a_verdict_and_memory(captured: CapturedTraining) -> None:
    explanation = captured.explanation
    assert explanation.verdict
    assert "defect" not in explanation.verdict
    memory = explanation.ranks[0].memory
    assert memory is not None
    assert memory.categories["parameters"]
