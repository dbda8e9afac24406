"""tf32 and cudnn-benchmark: switches of torch that a script sets once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from injected import TRAINING, patch_of, run_injected
from training_scripts import CONVOLUTIONS

from stepscope.fix.named_changes import load_change
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

SHOWS = """\
    if step == 1:
        print(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        print(torch.backends.cudnn.benchmark)
"""


@pytest.mark.slow
def test_switches_are_on_when_training_begins(tmp_path: Path) -> None:
    run = run_injected(tmp_path, TRAINING + SHOWS, "tf32", "cudnn-benchmark")
    assert run.output.splitlines() == ["high True", "True"]
    assert run.did == {
        "tf32": ["matmuls use TF32"],
        "cudnn-benchmark": ["cuDNN tries its algorithms"],
    }


@pytest.mark.slow
def test_lines_at_the_top(tmp_path: Path) -> None:
    plain = run_injected(tmp_path, CONVOLUTIONS)
    _, text = patch_of(plain, "tf32", "cudnn-benchmark")
    assert text.decode().splitlines()[:6] == [
        "import torch",
        "from torch import nn",
        "",
        'torch.set_float32_matmul_precision("high")',
        "",
        "torch.backends.cudnn.benchmark = True",
    ]


@pytest.mark.slow
def test_what_the_script_sets_is_replaced(tmp_path: Path) -> None:
    script = TRAINING.replace(
        "model =",
        'torch.set_float32_matmul_precision("highest")\n'
        "torch.backends.cudnn.allow_tf32 = False\n"
        "torch.backends.cudnn.benchmark = False\n"
        "model =",
    )
    run = run_injected(tmp_path, script + SHOWS, "tf32", "cudnn-benchmark")
    assert run.output.splitlines() == ["high True", "True"]
    assert run.did["tf32"] == ["matmuls use TF32", "convolutions use TF32"]
    plain = run_injected(tmp_path, script)
    _, text = patch_of(plain, "tf32", "cudnn-benchmark")
    assert text.decode() == script.replace('"highest"', '"high"').replace("= False", "= True")


@pytest.mark.slow
def test_torchs_newer_switches_are_respected(tmp_path: Path) -> None:
    """Torch raises where it is asked about both kinds."""
    script = TRAINING.replace(
        "model =", 'torch.backends.cuda.matmul.fp32_precision = "tf32"\nmodel =', 1
    )
    run = run_injected(tmp_path, script, "tf32")
    assert run.facts.matmul_precision == "mixed"
    assert run.refused == {
        "tf32": load_change("tf32").fix.fits(replace(run.facts, device="cuda"), "")
    }
    assert len(run.losses) == 6


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (ScriptFacts(device="cuda", dtypes=("float32",)), None),
        (ScriptFacts(device="cpu"), "it needs a CUDA device"),
        (ScriptFacts(device="cuda", dtypes=("bfloat16",)), "no parameter is fp32"),
        (ScriptFacts(device="cuda", matmul_precision="high"), "the script already uses TF32"),
        (ScriptFacts(device="cuda", matmul_precision="high", conv_tf32=False), None),
        (
            ScriptFacts(device="cuda", autocast="bfloat16"),
            "the script's matmuls already run in bfloat16",
        ),
        (
            ScriptFacts(device="cuda", matmul_precision="mixed"),
            "the script sets precision with torch.backends.*.fp32_precision. Choose tf32 there",
        ),
    ],
)
def test_where_tf32_fits(facts: ScriptFacts, why: str | None) -> None:
    assert load_change("tf32").fix.fits(facts, "") == why


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (ScriptFacts(device="cuda", modules={"Conv2d": 1}), None),
        (ScriptFacts(device="cuda", modules={"Linear": 1}), "no module is a convolution"),
        (ScriptFacts(device="cpu", modules={"Conv2d": 1}), "it needs a CUDA device"),
        (
            ScriptFacts(device="cuda", modules={"Conv2d": 1}, cudnn_benchmark=True),
            "the script has it on already",
        ),
        (
            ScriptFacts(device="cuda", modules={"Conv2d": 1}, deterministic=True),
            "the script asks for deterministic algorithms",
        ),
    ],
)
def test_where_cudnn_benchmark_fits(facts: ScriptFacts, why: str | None) -> None:
    assert load_change("cudnn-benchmark").fix.fits(facts, "") == why
