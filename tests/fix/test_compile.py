"""compile: the modules that a script calls are compiled in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from injected import TRAINING, assert_patch_trains_the_same, patch_of, run_injected
from training_scripts import ADVERSARIAL, CLIPS, CONVOLUTIONS, DDP, TRAINER

from stepscope.errors import UsageError
from stepscope.fix.named_changes import choose
from stepscope.fix.remedies.kernels import COMPILE
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

# The compiler's front end alone: what it compiles runs as it is.
EAGER = """\
import torch
import torch._dynamo
original = torch.compile
torch.compile = lambda *args, **options: original(*args, backend="eager")
"""
GRAPHS = """
    if step == 6:
        counted = torch._dynamo.utils.counters
        print(counted["stats"]["unique_graphs"], sum(counted["graph_break"].values()), flush=True)
"""


@pytest.mark.slow
def test_one_graph_and_no_recompilation(tmp_path: Path) -> None:
    run = run_injected(tmp_path, EAGER + TRAINING + GRAPHS, "compile", "bf16", steps=8)
    forward = "model.forward = torch.compile(model.forward)"
    assert run.did["compile=default"] == [f"Sequential: {forward}"]
    assert run.did["bf16"]
    assert run.output.split() == ["1", "0"]
    assert run.facts.compiled


@pytest.mark.slow
def test_what_is_tried_together_trains_as_the_patch(tmp_path: Path) -> None:
    script = EAGER + CONVOLUTIONS
    source = assert_patch_trains_the_same(tmp_path, script, "channels-last", "bf16", "compile")
    assert "\nmodel.to(memory_format=torch.channels_last)\nmodel.forward = torch.compile(" in source


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    source = assert_patch_trains_the_same(tmp_path, EAGER + DDP, "compile", "bf16", ranks=2)
    assert "\nmodel.compile()\nfor x, y in" in source


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (
            TRAINING,
            ['model.forward = torch.compile(model.forward, mode="reduce-overhead")\nfor step'],
        ),
        (TRAINER, ['        self.model.compile(mode="reduce-overhead")\n        for number,']),
        (CLIPS, ['model.compile(mode="reduce-overhead")\nfor epoch in']),
        (
            ADVERSARIAL,
            [
                'make.forward = torch.compile(make.forward, mode="reduce-overhead")\n',
                'judge.forward = torch.compile(judge.forward, mode="reduce-overhead")\nfor step',
            ],
        ),
    ],
    ids=["plain", "trainer", "epochs", "two models"],
)
def test_the_line_stands_before_training(tmp_path: Path, script: str, lines: list[str]) -> None:
    _, text = patch_of(run_injected(tmp_path, script), "compile=reduce-overhead")
    for line in lines:
        assert line in text.decode()


def test_an_unknown_mode_is_an_error_of_use() -> None:
    with pytest.raises(UsageError, match="compile does not take the value 'fastest'"):
        choose("compile=fastest")


@pytest.mark.slow
def test_with_the_whole_compiler(tmp_path: Path) -> None:
    assert_patch_trains_the_same(tmp_path, TRAINING, "compile", "bf16")


@pytest.mark.parametrize(
    ("facts", "value", "why"),
    [
        (ScriptFacts(roots=("Net",)), "default", None),
        (ScriptFacts(roots=("Net",), device="cuda"), "reduce-overhead", None),
        (
            ScriptFacts(roots=("Net",)),
            "reduce-overhead",
            "it captures CUDA graphs, so it needs a CUDA device",
        ),
        (
            ScriptFacts(roots=("Net",), compiled=True),
            "default",
            "the script compiles its model already",
        ),
        (ScriptFacts(), "default", "stepscope saw no call of a model"),
        (
            ScriptFacts(roots=("Net",), no_compiler="triton is not installed"),
            "default",
            "triton is not installed",
        ),
    ],
)
def test_where_it_fits(facts: ScriptFacts, value: str, why: str | None) -> None:
    assert COMPILE.fits(facts, value) == why
