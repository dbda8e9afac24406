"""gc-freeze, and the proposal no-sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from injected import TRAINING, assert_patch_trains_the_same, run_injected

from stepscope.fix.begin import begin
from stepscope.fix.named_changes import load_change
from stepscope.fix.proposal import Script, edited
from stepscope.records.script_facts import Frame, ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

FILE = "/home/u/train.py"


@pytest.mark.slow
def test_objects_are_frozen_bit_for_bit_the_same(tmp_path: Path) -> None:
    plain = run_injected(tmp_path, TRAINING)
    assert plain.facts.collects
    run = run_injected(tmp_path, TRAINING, "gc-freeze")
    assert run.did["gc-freeze"] == ["froze all objects that existed after 5 steps"]
    assert run.losses == plain.losses
    assert not run.facts.collects
    assert load_change("gc-freeze").fix.fits(run.facts, "") is not None
    source = assert_patch_trains_the_same(tmp_path, TRAINING, "gc-freeze")
    assert "import gc\n" in source
    assert "gc.collect()\ngc.freeze()\nfor step in range(8):" in source


@pytest.mark.slow
def test_a_script_without_collections_is_left_as_it_is(tmp_path: Path) -> None:
    script = TRAINING.replace("import torch\n", "import gc, torch\ngc.disable()\n", 1)
    run = run_injected(tmp_path, script, "gc-freeze")
    assert run.refused == {"gc-freeze": "the script has turned garbage collection off"}
    assert run.did["gc-freeze"] == []


def test_a_loop_that_a_library_runs_is_named(tmp_path: Path) -> None:
    script = Script(ScriptFacts(), lambda _file: None)
    assert "gc.freeze()" in load_change("gc-freeze").fix.patch(script, "").by_hand[0]


def proposed(loop: str) -> tuple[str, tuple[str, ...]]:
    text = loop.encode()
    line = next(n for n, row in enumerate(loop.splitlines(), 1) if "optimizer.step()" in row)
    frame = Frame(file=FILE, line=line, function="<module>")
    read = {FILE: text}.get
    proposal = load_change("no-sync").fix.patch(Script(ScriptFacts(step=(frame,)), read), "")
    return edited(proposal.edits, read).get(FILE, text).decode(), proposal.by_hand


LOOP = """\
for i, (x, y) in enumerate(loader):
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    {}
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("total += loss.item()", "total += loss.detach()"),
        ("total += loss.item() * len(x)", "total += loss.detach() * len(x)"),
        ("losses.append(loss.item())", "losses.append(loss.detach())"),
        (
            "print(i, loss.item())",
            "if i % 50 == 0:\n        print(i, loss.item())",
        ),
        ('print(f"{loss:.3f}")', 'if i % 50 == 0:\n        print(f"{loss:.3f}")'),
    ],
)
def test_reads_in_every_step_are_edited(line: str, expected: str) -> None:
    text, by_hand = proposed(LOOP.format(line))
    assert text == LOOP.format(expected)
    assert by_hand == ()


@pytest.mark.parametrize(
    "line",
    [
        "value = loss.item()",
        "history[i] = float(loss)",
        "if loss > 1e4: break",
        "if torch.isnan(loss): break",
        "scores = model.scores.cpu().numpy()",
        'norm = gradients.to("cpu")',
    ],
)
def test_other_reads_are_named_with_their_line(line: str) -> None:
    text, by_hand = proposed(LOOP.format(line))
    assert text == LOOP.format(line)
    (words,) = by_hand
    assert words.startswith(f"{FILE}:5: `")


@pytest.mark.parametrize(
    "line",
    [
        "if i % 100 == 0: print(loss.item())",
        "total += loss.detach()",
        "print(i)",
        "if scheduler is not None: scheduler.step()",
        "hook = lambda: loss.item()",
        "x = x.to(device)",
        "for v in validation: print(v.item())",
    ],
)
def test_what_does_not_wait_in_every_step_is_left_out(line: str) -> None:
    text, by_hand = proposed(LOOP.format(line))
    assert text == LOOP.format(line)
    assert by_hand == ()


def test_a_scaled_loss_is_the_same_loss() -> None:
    loop = LOOP.replace("loss.backward()", "scaler.scale(loss).backward()")
    assert proposed(loop.format("print(loss)"))[0] == loop.format(
        "if i % 50 == 0:\n        print(loss)"
    )
    assert proposed(loop.format("print(scaler)")) == (loop.format("print(scaler)"), ())


def test_a_proposal_cannot_be_applied_from_outside() -> None:
    (content,) = begin(
        ["no-sync"], lambda *_: None, lambda function: function, watch=False
    ).content()
    assert content["did"] == []
    assert "edit of the script" in content["refused"]


def test_on_a_cpu_nothing_is_waited_for() -> None:
    fix = load_change("no-sync").fix
    assert fix.apply is None
    assert fix.fits(ScriptFacts(device="cuda"), "") is None
    assert "CPU" in str(fix.fits(ScriptFacts(device="cpu"), ""))
