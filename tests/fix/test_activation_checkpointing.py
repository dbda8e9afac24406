"""activation-checkpointing: repeated blocks are computed again, to the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from injected import run_injected, run_patched
from training_scripts import CLIPS, TRAINER

from stepscope.fix.remedies.memory import ACTIVATION_CHECKPOINTING
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

ID = "activation-checkpointing"
COUNTS = """
import atexit
calls = 0
forward = Block.forward
def counted(self, x):
    global calls
    calls += 1
    return forward(self, x)
Block.forward = counted
"""


def _counting(script: str) -> str:
    """The script, printing how often blocks were computed before its third step."""
    return script.replace("torch.manual_seed(0)\n", COUNTS + "torch.manual_seed(0)\n").replace(
        "        optimizer.step()\n", "        print(calls, flush=True)\n        optimizer.step()\n"
    )


@pytest.mark.slow
def test_losses_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """With dropout in the blocks, whose random numbers are drawn again."""
    plain = run_injected(tmp_path, _counting(CLIPS))
    injected = run_injected(tmp_path, _counting(CLIPS), ID)
    patched = run_patched(tmp_path, _counting(CLIPS), ID)
    assert injected.did == {ID: ["3 blocks of type Block recompute their activations"]}
    assert plain.losses == injected.losses == patched.losses
    assert plain.output.split()[:2] == ["3", "6"]
    assert injected.output.split()[:2] == patched.output.split()[:2] == ["6", "12"]
    assert plain.facts.blocks == ("Block", 3)
    assert plain.facts.block_list == "blocks"


@pytest.mark.slow
def test_the_patch_stands_before_training(tmp_path: Path) -> None:
    """In a class, the model is called by a name of its own in the outermost function with it."""
    plain = run_injected(tmp_path, TRAINER)
    patched = run_patched(tmp_path, TRAINER, ID)
    assert patched.losses == plain.losses
    assert "        for block in self.model.blocks.children():\n" in patched.source
    assert patched.source.index("for block in self.model") < patched.source.index("for number,")


LIBRARY_MODEL = """\
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    tokens = torch.randint(32, (2, 8))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_library_model_uses_its_own_switch(tmp_path: Path) -> None:
    plain = run_injected(tmp_path, LIBRARY_MODEL, steps=4)
    injected = run_injected(tmp_path, LIBRARY_MODEL, ID, steps=4)
    patched = run_patched(tmp_path, LIBRARY_MODEL, ID, steps=4)
    assert injected.did == {ID: ["GPT2LMHeadModel: gradient_checkpointing_enable()"]}
    assert plain.losses == injected.losses == patched.losses
    assert "\nmodel.gradient_checkpointing_enable(" in patched.source
    assert injected.facts.checkpointed


@pytest.mark.slow
def test_blocks_with_running_statistics_are_refused(tmp_path: Path) -> None:
    script = CLIPS.replace("self.drop = nn.Dropout(0.1)", "self.drop = nn.BatchNorm1d(width)")
    run = run_injected(tmp_path, script, ID)
    why = "the blocks update running statistics, which would count each batch twice"
    assert run.refused == {ID: why}
    assert ACTIVATION_CHECKPOINTING.fits(run.facts, "") == why


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (ScriptFacts(blocks=("Block", 12)), None),
        (ScriptFacts(), "the model has no repeated blocks"),
        (
            ScriptFacts(blocks=("Block", 12), checkpointed=True),
            "the script checkpoints its blocks already",
        ),
    ],
)
def test_where_it_fits(facts: ScriptFacts, why: str | None) -> None:
    assert ACTIVATION_CHECKPOINTING.fits(facts, "") == why


def test_it_is_declared_to_save_memory() -> None:
    assert ACTIVATION_CHECKPOINTING.saves == "memory"
