"""bf16: the injected autocast trains as the patched script does, and touches nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from injected import TRAINING, assert_patch_trains_the_same, patch_of, run_injected
from training_scripts import ADAPTS, ADVERSARIAL, BY_HAND, EVALUATES, HOOKS, TRAINER

from stepscope.fix.remedies.precision import BF16
from stepscope.records.script_facts import Built, ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_losses_differ_from_fp32_and_agree_with_the_patch(tmp_path: Path) -> None:
    source = assert_patch_trains_the_same(tmp_path, TRAINING, "bf16")
    assert (
        '    with torch.autocast("cpu", dtype=torch.bfloat16):\n'
        "        logits = model(x)\n"
        "        loss = F.cross_entropy(logits, y)\n"
        "    loss.backward()\n"
    ) in source
    plain = run_injected(tmp_path, TRAINING)
    injected = run_injected(tmp_path, TRAINING, "bf16")
    assert plain.losses != injected.losses
    assert plain.values == pytest.approx(injected.values, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAINER, HOOKS, ADVERSARIAL], ids=["trainer", "hooks", "gan"])
def test_scripts_of_other_make(tmp_path: Path, script: str) -> None:
    source = assert_patch_trains_the_same(tmp_path, script, "bf16")
    assert source.count("torch.autocast") == script.count(".backward()")


@pytest.mark.slow
def test_evaluation_is_left_alone(tmp_path: Path) -> None:
    run = run_injected(tmp_path, EVALUATES, "bf16", steps=9)
    assert run.output.splitlines() == [
        "trains torch.bfloat16",
        "evaluates torch.float32",
        "with gradients torch.float32",
        "products torch.float32",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("script", [BY_HAND, ADAPTS], ids=["between calls", "inside a call"])
def test_updates_by_hand_are_seen_by_the_next_forward(tmp_path: Path, script: str) -> None:
    """Autocast remembers narrow weights until it ends: the last gradients make it forget."""
    plain = run_injected(tmp_path, script).output.split()
    injected = run_injected(tmp_path, script, "bf16").output.split()
    assert set(injected[0::3]) == {"torch.bfloat16"}
    assert set(injected[1::3]) == {"torch.float32"}
    losses = [[float(word) for word in words[2::3]] for words in (plain, injected)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.slow
def test_an_autocast_of_the_script_is_not_wrapped(tmp_path: Path) -> None:
    own = TRAINING.replace(
        "    logits = model(x)\n",
        '    with torch.autocast("cpu", enabled=False):\n        logits = model(x)\n',
    )
    proposal, _ = patch_of(run_injected(tmp_path, own), "bf16")
    assert not proposal.edits
    assert "backward starts at" in proposal.by_hand[0]


@pytest.mark.slow
def test_forward_and_backward_in_one_statement_are_left_to_the_user(tmp_path: Path) -> None:
    short = TRAINING.replace(
        "    logits = model(x)\n    loss = F.cross_entropy(logits, y)\n    loss.backward()\n",
        "    F.cross_entropy(model(x), y).backward()\n",
    )
    proposal, _ = patch_of(run_injected(tmp_path, short), "bf16")
    assert not proposal.edits
    assert proposal.by_hand


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (ScriptFacts(device="cpu", bf16=True, dtypes=("float32",)), None),
        (ScriptFacts(device="cuda", bf16=True, dtypes=("float32",)), None),
        (ScriptFacts(device="cuda", bf16=None, dtypes=("float32",)), None),
        (ScriptFacts(device="cpu", bf16=False), "this CPU has no instructions for bf16 matmuls"),
        (ScriptFacts(device="cuda", bf16=False), "this GPU has no instructions for bf16 matmuls"),
        (ScriptFacts(autocast="float16"), "the script uses autocast itself (float16)"),
        (ScriptFacts(dtypes=("bfloat16",)), "no parameter is fp32"),
        (
            ScriptFacts(
                built=(Built(kind="scaler", type="GradScaler", options={}, given=(), frames=()),)
            ),
            "the script has its own GradScaler, which bf16 does not need",
        ),
    ],
)
def test_where_it_fits(facts: ScriptFacts, why: str | None) -> None:
    assert BF16.fits(facts, "") == why
