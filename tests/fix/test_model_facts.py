"""What is noted about models and their device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepscope.fix.model_structure import (
    checkpoint_switch,
    find_blocks,
    is_compiled,
    torchs_forward,
)
from stepscope.fix.watch_script import model_facts


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(4))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Switchable(Model):
    def gradient_checkpointing_enable(self, **_options: object) -> None:
        raise NotImplementedError


def test_the_outer_blocks_that_hold_the_most() -> None:
    blocks = find_blocks(Model())
    assert blocks is not None
    assert (blocks.path, blocks.type, len(blocks.modules)) == ("encoder.layers", "Layer", 4)
    assert not blocks.update_statistics


def test_layers_without_parts_are_no_blocks() -> None:
    assert find_blocks(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))) is None


def test_normalisation_over_batches_is_noticed() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)))
    blocks = find_blocks(model)
    assert blocks is not None
    assert blocks.update_statistics


def test_a_model_that_can_checkpoint_itself() -> None:
    assert checkpoint_switch(Model()) is None
    assert checkpoint_switch(Switchable()) == ""
    assert checkpoint_switch(nn.ModuleDict({"module": Switchable()})) == "module"


def test_whose_forward_it_is() -> None:
    assert torchs_forward(nn.Sequential(nn.Linear(4, 4))) == ""
    assert torchs_forward(Model()) is None


def test_ways_to_compile() -> None:
    in_place, forward, plain = (nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
    in_place.compile(backend="eager")
    forward.forward = torch.compile(forward.forward, backend="eager")  # type: ignore[method-assign]
    assert is_compiled(in_place)
    assert is_compiled(forward)
    assert is_compiled(torch.compile(plain, backend="eager"))
    assert not is_compiled(plain)


@pytest.mark.parametrize(
    ("avx512", "instructions", "one_dnn", "has"),
    [(True, False, True, False), (True, True, True, True), (False, False, True, True)],
    ids=["wide vectors only", "x86 with bf16", "arm with bf16"],
)
def test_bf16_counts_only_if_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, instructions: bool, one_dnn: bool, has: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: one_dnn)
    assert model_facts([Model()])["bf16"] is has


def test_the_users_own_files_are_named() -> None:
    assert model_facts([Model()])["sources"] == (__file__,)
    assert model_facts([nn.Sequential(nn.Linear(4, 4))])["sources"] == ()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    why = model_facts([Model()])["no_compiler"]
    assert why == "torch.compile needs a C++ compiler, and none is installed"
