"""fp16: a GradScaler is injected where the script has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from injected import TRAINING, assert_patch_trains_the_same, patch_of, run_injected
from training_scripts import ADVERSARIAL, CLIPS, TRAINER

from stepscope.fix.remedies.precision import FP16
from stepscope.records.script_facts import Built, ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

    from injected import TrialRun

OPTIMIZER = Built(kind="optimizer", type="SGD", options={}, given=(), frames=())
SCALER = Built(kind="scaler", type="GradScaler", options={}, given=(), frames=())


@pytest.mark.slow
def test_the_patch_makes_a_scaler(tmp_path: Path) -> None:
    source = assert_patch_trains_the_same(tmp_path, TRAINING, "fp16")
    assert 'scaler = torch.amp.GradScaler("cpu")\n' in source
    assert (
        '    with torch.autocast("cpu", dtype=torch.float16):\n'
        "        logits = model(x)\n"
        "        loss = F.cross_entropy(logits, y)\n"
        "    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
    ) in source


@pytest.mark.slow
def test_clipping_sees_unscaled_gradients(tmp_path: Path) -> None:
    source = assert_patch_trains_the_same(tmp_path, CLIPS, "fp16")
    assert "        scaler.unscale_(optimizer)\n        clip_grad_norm_(" in source
    plain = run_injected(tmp_path, CLIPS)
    injected = run_injected(tmp_path, CLIPS, "fp16")
    assert plain.values == pytest.approx(injected.values, rel=0.02)


@pytest.mark.slow
def test_accumulated_passes(tmp_path: Path) -> None:
    """The two statements are in different functions of one file."""
    assert_patch_trains_the_same(tmp_path, TRAINER, "fp16")


@pytest.mark.slow
def test_a_step_with_infinite_gradients_is_skipped(tmp_path: Path) -> None:
    script = TRAINING.replace(
        "    optimizer.step()\n",
        "    if step == 2:\n"
        "        model[0].weight.grad[0, 0] = float('inf')\n"
        "    before = model[0].weight.detach().clone()\n"
        "    optimizer.step()\n"
        "    print(step, torch.equal(before, model[0].weight), flush=True)\n",
    )
    run = run_injected(tmp_path, script, "fp16", steps=5)
    assert run.output.splitlines()[:4] == ["0 False", "1 False", "2 True", "3 False"]


def _unchanged(tmp_path: Path, script: str) -> TrialRun:
    """A refused remedy leaves the training as it is."""
    plain = run_injected(tmp_path, script)
    run = run_injected(tmp_path, script, "fp16")
    assert run.losses == plain.losses
    return run


@pytest.mark.slow
def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    run = _unchanged(tmp_path, ADVERSARIAL)
    assert run.refused == {"fp16": "the script has several optimizers"}


@pytest.mark.slow
def test_a_scaler_of_the_script_is_refused(tmp_path: Path) -> None:
    script = TRAINING.replace(
        "for step", 'own = torch.amp.GradScaler("cpu", enabled=False)\nfor step', 1
    )
    run = _unchanged(tmp_path, script)
    assert run.refused == {"fp16": "the script has its own GradScaler"}


@pytest.mark.slow
def test_a_closure_is_refused(tmp_path: Path) -> None:
    script = TRAINING.replace(
        "    optimizer.zero_grad()\n"
        "    logits = model(x)\n"
        "    loss = F.cross_entropy(logits, y)\n"
        "    loss.backward()\n"
        "    optimizer.step()\n",
        "    def closure():\n"
        "        optimizer.zero_grad()\n"
        "        loss = F.cross_entropy(model(x), y)\n"
        "        loss.backward()\n"
        "        return loss\n"
        "    optimizer.step(closure)\n",
    )
    run = _unchanged(tmp_path, script)
    assert run.refused == {"fp16": "the optimizer computes the loss in a closure"}
    assert run.facts.closure


@pytest.mark.slow
def test_an_optimizer_that_is_not_torchs_gets_unscaled_gradients(tmp_path: Path) -> None:
    """It was not seen when it was built: torch's optimizer beside it was."""
    own = """
class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        print(max(p.grad.abs().max().item() for g in self.param_groups for p in g["params"]) < 10)


"""
    script = TRAINING.replace("torch.manual_seed(0)\n", own + "torch.manual_seed(0)\n").replace(
        "    optimizer.step()\n",
        "    if step == 3:\n        Own(model.parameters()).step()\n    optimizer.step()\n",
    )
    run = run_injected(tmp_path, script, "fp16")
    assert run.output.split() == ["True"]
    assert run.refused == {"fp16": "Own steps, which is not torch's own"}


@pytest.mark.slow
def test_half_a_patch_is_none(tmp_path: Path) -> None:
    """The optimizer steps in an expression: only the autocast could be written."""
    script = TRAINING.replace("optimizer.step()", "result = optimizer.step()")
    proposal, _ = patch_of(run_injected(tmp_path, script), "fp16")
    assert not proposal.edits
    assert "scaler.scale(loss).backward()" in proposal.by_hand[0]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (ScriptFacts(device="cuda", built=(OPTIMIZER,)), None),
        (ScriptFacts(device="cpu", built=(OPTIMIZER,)), "it needs a CUDA device"),
        (
            ScriptFacts(device="cuda", built=(OPTIMIZER, SCALER)),
            "the script has its own GradScaler",
        ),
        (
            ScriptFacts(device="cuda", built=(OPTIMIZER, OPTIMIZER)),
            "it needs one torch optimizer, but the script has 2",
        ),
        (
            ScriptFacts(device="cuda", built=(OPTIMIZER,), closure=True),
            "the optimizer computes the loss in a closure",
        ),
        (
            ScriptFacts(device="cuda", built=(OPTIMIZER,), dtypes=("float16", "float32")),
            "parameters are fp16, so their gradients cannot be unscaled",
        ),
        (
            ScriptFacts(device="cuda", built=(OPTIMIZER,), modules={"FSDPLinear": 1}),
            "sharded gradients need FSDP's own scaler",
        ),
    ],
)
def test_where_it_fits(facts: ScriptFacts, why: str | None) -> None:
    assert FP16.fits(facts, "") == why
