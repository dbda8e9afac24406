"""channels-last: model and images are converted, where convolutions are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from injected import assert_patch_trains_the_same, run_injected
from training_scripts import CONVOLUTIONS

from stepscope.fix.remedies.kernels import CHANNELS_LAST
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_model_and_images_are_converted(tmp_path: Path) -> None:
    source = assert_patch_trains_the_same(tmp_path, CONVOLUTIONS, "channels-last")
    assert "\nmodel.to(memory_format=torch.channels_last)\nfor step" in source
    assert "model((images - 0.5).to(memory_format=torch.channels_last))" in source


@pytest.mark.slow
def test_together_with_bf16(tmp_path: Path) -> None:
    assert_patch_trains_the_same(tmp_path, CONVOLUTIONS, "channels-last", "bf16")


@pytest.mark.slow
def test_layout_seen_inside_the_model(tmp_path: Path) -> None:
    script = CONVOLUTIONS.replace(
        "optimizer =",
        "def show(module, args):\n"
        "    formats = [t.is_contiguous(memory_format=torch.channels_last)\n"
        "               for t in (args[0], module.weight)]\n"
        "    print(formats)\n"
        "model[0].register_forward_pre_hook(show)\n"
        "optimizer =",
    )
    assert run_injected(tmp_path, script, steps=2).output.splitlines()[0] == "[False, False]"
    run = run_injected(tmp_path, script, "channels-last", steps=2)
    assert run.output.splitlines()[0] == "[True, True]"
    assert run.did == {"channels-last": ["Sequential: channels last"]}


CONVOLVING = {"Conv2d": 2, "BatchNorm2d": 1}


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (ScriptFacts(modules=CONVOLVING, image_inputs=True), None),
        (ScriptFacts(modules={"Conv3d": 1}, image_inputs=True), None),
        (ScriptFacts(modules={"Linear": 3}), "no module is a convolution"),
        (
            ScriptFacts(modules=CONVOLVING),
            "no model is given images (floating tensors of four or five dimensions)",
        ),
        (
            ScriptFacts(modules={"Conv2d": 1, "Conv3d": 1}, image_inputs=True),
            "the models have convolutions of images and of volumes, and no format fits both",
        ),
    ],
)
def test_where_it_fits(facts: ScriptFacts, why: str | None) -> None:
    assert CHANNELS_LAST.fits(facts, "") == why
