"""save-memory as a remedy: where it fits, what it writes, and the same losses to the last bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from injected import run_injected, run_patched
from torch import nn

from stepscope.errors import UsageError
from stepscope.fix import save_memory
from stepscope.fix.named_changes import choose
from stepscope.fix.remedies.memory import SAVE_MEMORY
from stepscope.fix.saved.attach import saving_content
from stepscope.records.memory import SAVING_FILE
from stepscope.records.script_facts import ScriptFacts
from stepscope.trace.run_folder.rank_folder import read_saving

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
layers = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
model = nn.Sequential(*layers, nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (ScriptFacts(roots=("Net",), compiled=True), "the compiler already frees"),
        (ScriptFacts(roots=("Net",), checkpointed=True), "already checkpoints its blocks"),
        (ScriptFacts(), "stepscope saw no call of a model"),
    ],
)
def test_where_it_does_not_fit(facts: ScriptFacts, words: str) -> None:
    assert words in (SAVE_MEMORY.fits(facts, "5%") or "")


def test_it_fits_an_eager_model() -> None:
    assert SAVE_MEMORY.fits(ScriptFacts(roots=("Net",)), "5%") is None


def test_values_are_targets() -> None:
    assert str(choose("save-memory")) == "save-memory=5%"
    for value in ("max", "15%", "0.5", "12GB", "2x", "5%+2x", "15%+heavy"):
        assert choose(f"save-memory={value}").value == value
    with pytest.raises(UsageError, match="does not take"):
        choose("save-memory=some")


def test_what_a_run_folder_keeps_is_read_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    saver = save_memory(model)
    assert saving_content(saver) is None
    for _ in range(4):
        model(torch.randn(32, 8)).sum().backward()
    content = saving_content(saver)
    (tmp_path / SAVING_FILE).write_text(json.dumps(content))
    saving, notes = read_saving(tmp_path)
    assert saving is not None
    assert notes == ()
    assert saver.plan is not None
    assert saving.peak_bytes == saver.plan.peak_bytes
    before = sum(row.before_bytes for row in saving.actions)
    assert before == saver.plan.saved_bytes_before == saving.saved_bytes_before
    assert saving.timeline is not None
    assert max(saving.timeline.after_bytes) == saver.plan.peak_bytes


@pytest.mark.parametrize("text", ["{", '{"timeline": {"after_bytes": [1]}}', '{"peak_bytes": -1}'])
def test_a_damaged_file_stops_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / SAVING_FILE).write_text(text)
    saving, notes = read_saving(tmp_path)
    assert saving is None or saving.timeline is None
    assert notes


@pytest.mark.slow
def test_losses_are_the_same_to_the_bit(tmp_path: Path) -> None:
    plain = run_injected(tmp_path, SCRIPT, steps=10)
    injected = run_injected(tmp_path, SCRIPT, "save-memory=max", steps=10)
    patched = run_patched(tmp_path, SCRIPT, "save-memory=max", steps=10)
    assert plain.losses == injected.losses == patched.losses
    (told,) = injected.did["save-memory=max"]
    assert told.startswith("Backward needs ")
    assert "save_memory(model, warmup=3)" in patched.source
    saving, _ = read_saving(next(injected.folder.glob("**/rank-00000")))
    assert saving is not None
    assert saving.held_bytes == saving.saved_bytes < saving.saved_bytes_before
