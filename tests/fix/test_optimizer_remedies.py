"""fused-optimizer, foreach-optimizer and set-to-none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from injected import (
    TRAINING,
    assert_patch_trains_the_same,
    patch_of,
    run_injected,
    run_patched,
)
from torch.optim.optimizer import _device_dtype_check_for_fused

from stepscope.fix.named_changes import load_change
from stepscope.fix.proposal import Script
from stepscope.fix.remedies.optimizer import why_not_fused
from stepscope.records.script_facts import Built, Frame, ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-2)"


def optimizer(type_name: str = "AdamW", **options: Any) -> Built:
    defaults = {"lr": 0.01, "fused": None, "foreach": None, "differentiable": False}
    return Built(kind="optimizer", type=type_name, options=defaults | options, given=(), frames=())


def why(remedy: str, *built: Built, device: str = "cpu") -> str | None:
    return load_change(remedy).fix.fits(ScriptFacts(device=device, built=built), "")


def test_what_can_be_fused() -> None:
    assert why("fused-optimizer", optimizer()) is None
    assert why("fused-optimizer", optimizer(), device="cuda") is None
    assert why("fused-optimizer") == "no torch optimizer was built"
    assert "already" in str(why("fused-optimizer", optimizer(fused=True)))
    assert "differentiable" in str(why("fused-optimizer", optimizer(differentiable=True)))
    assert "vulkan" in str(why("fused-optimizer", optimizer(), device="vulkan"))
    rprop = Built(kind="optimizer", type="Rprop", options={"lr": 0.1}, given=(), frames=())
    assert why("fused-optimizer", rprop) == "Rprop has no fused form"
    assert why("fused-optimizer", rprop, optimizer()) is None


def test_foreach_is_offered_where_it_is_not_the_default() -> None:
    assert why("foreach-optimizer", optimizer()) is None
    assert "already uses foreach" in str(why("foreach-optimizer", optimizer(), device="cuda"))
    assert why("foreach-optimizer", optimizer(foreach=False), device="cuda") is None
    assert "already" in str(why("foreach-optimizer", optimizer(foreach=True)))
    assert "fused" in str(why("foreach-optimizer", optimizer(fused=True)))
    assert "tensor" in str(why("foreach-optimizer", optimizer(lr="<Tensor>")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        "torch.optim.Adagrad(model.parameters())",
        "torch.optim.Adam(model.parameters(), 1e-2, foreach=True, amsgrad=True)",
    ],
)
def test_fused_trains_as_its_patch_does(tmp_path: Path, call: str) -> None:
    source = assert_patch_trains_the_same(
        tmp_path, TRAINING.replace(ADAMW, call), "fused-optimizer"
    )
    assert "fused=True" in source
    assert "foreach=True" not in source


@pytest.mark.slow
def test_foreach_trains_as_its_patch_does(tmp_path: Path) -> None:
    call = "torch.optim.Adagrad(model.parameters(), 0.1, 0, 0, 0, 1e-10, False)"
    source = assert_patch_trains_the_same(
        tmp_path, TRAINING.replace(ADAMW, call), "foreach-optimizer"
    )
    assert "1e-10, True)" in source


@pytest.mark.slow
def test_a_group_keeps_what_it_was_given(tmp_path: Path) -> None:
    groups = (
        'torch.optim.SGD([{"params": model[0].parameters(), "fused": False}, '
        '{"params": model[2].parameters()}], lr=0.1)\n'
        'print("built", [group["fused"] for group in optimizer.param_groups])'
    )
    run = run_injected(tmp_path, TRAINING.replace(ADAMW, groups), "fused-optimizer")
    assert "built [False, True]" in run.output
    assert run.did["fused-optimizer"] == ["SGD: fused=True"]


SPARSE = TRAINING.replace("nn.Linear(16, 32)", "nn.EmbeddingBag(50, 32, sparse=True)")


@pytest.mark.slow
def test_sparse_gradients_are_found_before_torch_would_raise(tmp_path: Path) -> None:
    script = SPARSE.replace(ADAMW, "torch.optim.SGD(model.parameters(), lr=0.1)").replace(
        "torch.randn(8, 16)", "torch.randint(50, (8, 16))"
    )
    run = run_injected(tmp_path, script, "fused-optimizer")
    assert "sparse gradients" in run.refused["fused-optimizer"]
    assert run.losses == run_injected(tmp_path, script).losses


SCALED = (
    TRAINING.replace(
        "for step in range(8):",
        'scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)\nfor step in range(8):',
    )
    .replace("loss.backward()", "scaler.scale(loss).backward()")
    .replace("optimizer.step()", "scaler.step(optimizer)\n    scaler.update()")
)


@pytest.mark.slow
class ForCpusOnly:
    """Its check of the parameters, as Adagrad had it for years."""

    def _init_group(self, parameter: Any) -> None:
        _device_dtype_check_for_fused(parameter, cuda_unsupported=True)


def test_an_update_that_is_fused_on_cpus_alone_is_not_used_on_a_gpu() -> None:
    on_gpu = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        is_floating_point=lambda: True,
        grad=SimpleNamespace(is_sparse=False),
    )
    assert why_not_fused(torch.optim.Adam, [on_gpu]) is None
    assert why_not_fused(ForCpusOnly, [on_gpu]) == (
        "torch has no fused update for parameters on cuda"
    )


def test_fused_with_a_grad_scaler_trains_the_same_up_to_rounding(tmp_path: Path) -> None:
    plain = run_injected(tmp_path, SCALED)
    fused = run_injected(tmp_path, SCALED, "fused-optimizer")
    assert fused.values == pytest.approx(plain.values, rel=1e-5)


OWN_STEP = """\
class Signed(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign()

optimizer = Signed(model.parameters(), lr=1e-3)"""


@pytest.mark.slow
def test_a_subclass_with_an_update_of_its_own_is_left_alone(tmp_path: Path) -> None:
    """A GradScaler would take it for one that unscales gradients itself."""
    script = SCALED.replace(f"optimizer = {ADAMW}", OWN_STEP)
    run = run_injected(tmp_path, script, "fused-optimizer")
    assert run.refused["fused-optimizer"] == "Signed has its own update"
    assert run.losses == run_injected(tmp_path, script).losses


@pytest.mark.slow
def test_a_subclass_is_fused_where_it_calls_torchs_constructor(
    tmp_path: Path,
) -> None:
    inherits = (
        "class Mine(torch.optim.AdamW):\n"
        "    def __init__(self, params, lr):\n"
        "        super().__init__(params, lr=lr)\n"
        "optimizer = Mine(model.parameters(), lr=1e-2)"
    )
    script = TRAINING.replace(f"optimizer = {ADAMW}", inherits)
    run = run_injected(tmp_path, script, "fused-optimizer")
    assert run.did["fused-optimizer"] == ["Mine: fused=True"]
    _, text = patch_of(run_injected(tmp_path, script), "fused-optimizer")
    assert text.decode() == script.replace("(params, lr=lr)", "(params, lr=lr, fused=True)")


def test_an_optimizer_that_the_trainer_builds_is_its_option() -> None:
    frame = Frame(file="/nowhere/train.py", line=3, function="<module>")
    built = Built(
        kind="optimizer",
        type="AdamW",
        options={"fused": None},
        given=(),
        frames=(frame,),
        direct=False,
        library="transformers",
    )
    script = Script(ScriptFacts(built=(built,)), lambda _file: None)
    assert (
        'optim="adamw_torch_fused"'
        in load_change("fused-optimizer").fix.patch(script, "").by_hand[0]
    )


KEPT = TRAINING.replace("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)")


@pytest.mark.slow
@pytest.mark.parametrize("call", ["optimizer.zero_grad(False)", "model.zero_grad(False)"])
def test_gradients_are_dropped_bit_for_bit_the_same(tmp_path: Path, call: str) -> None:
    script = TRAINING.replace("optimizer.zero_grad()", call)
    plain = run_injected(tmp_path, script)
    assert load_change("set-to-none").fix.fits(plain.facts, "") is None
    source = assert_patch_trains_the_same(tmp_path, script, "set-to-none")
    assert call.replace("False", "True") in source
    assert run_patched(tmp_path, script, "set-to-none").losses == plain.losses


@pytest.mark.slow
def test_a_default_zero_grad_has_nothing_to_drop(tmp_path: Path) -> None:
    run = run_injected(tmp_path, TRAINING, "set-to-none")
    assert run.did["set-to-none"] == []
    assert "keeps the memory" in str(load_change("set-to-none").fix.fits(run.facts, ""))


@pytest.mark.slow
def test_a_parameter_without_gradient_in_some_steps_keeps_its_zeros(tmp_path: Path) -> None:
    """Weight decay would otherwise pass it over."""
    script = KEPT.replace("lr=1e-2", "lr=1e-2, weight_decay=0.5").replace(
        "logits = model(x)",
        "logits = model(x) if step % 2 == 0 else nn.functional.linear(x[:, :4], torch.eye(4)) "
        "+ model[2].bias",
    )
    plain = run_injected(tmp_path, script)
    run = run_injected(tmp_path, script, "set-to-none")
    assert "no gradient in some steps" in run.refused["set-to-none"]
    assert run.losses == plain.losses
