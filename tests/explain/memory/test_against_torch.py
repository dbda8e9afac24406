"""A real training step on this machine: what a trace tells against torch, capture and a hand."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest

from benches import analyse
from stepscope import read_trace
from stepscope.explain.memory.lifetimes import find_lifetimes
from stepscope.explain.memory.model import find_transformer, transformer_activations
from stepscope.records.memory import CATEGORIES

torch = pytest.importorskip("torch")
nn = torch.nn

BATCH, WIDTHS = 64, (256, 1024, 512, 10)
PARAMETERS = 4 * sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
# Outputs of both ReLUs and of log_softmax, and the loss's total weight: what backward needs.
SAVED = 4 * BATCH * (WIDTHS[1] + WIDTHS[2] + WIDTHS[3]) + 4


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> tuple[Path, Any]:
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    layers: list[Any] = []
    for into, out in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(into, out), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        inputs, labels = torch.randn(BATCH, WIDTHS[0]), torch.randint(0, 10, (BATCH,))
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            with_stack=True,
            profile_memory=True,
        ) as profiler:
            step()
        path = tmp_path_factory.mktemp("memory") / "trace.json"
        profiler.export_chrome_trace(str(path))
    return path, profiler


def _largest(path: Path) -> dict[str, int]:
    lifetimes = find_lifetimes(read_trace(path))
    assert lifetimes is not None
    return dict(zip(CATEGORIES, lifetimes.levels().max(axis=1).tolist(), strict=True))


def test_activations_are_exactly_what_backward_needs(profiled):
    assert _largest(profiled[0])["activations"] == SAVED


def test_gradients_are_as_large_as_the_parameters(profiled):
    assert _largest(profiled[0])["gradients"] == PARAMETERS


def test_torchs_own_memory_profiler_counts_the_same(profiled):
    """Its categories differ: activations are all that forward makes, gradients all that backward
    makes. Parameters and inputs are what ours are told from."""
    from torch.profiler._memory_profiler import (
        _CATEGORY_TO_INDEX,
        Category,
        MemoryProfileTimeline,
    )

    path, profiler = profiled
    timeline = MemoryProfileTimeline(profiler._memory_profile())
    _, sizes = timeline._coalesce_timeline("cpu")

    def most(category: Any) -> int:
        return max(row[_CATEGORY_TO_INDEX[category] + 1] for row in sizes)

    ours = _largest(path)
    assert ours["gradients"] == most(Category.PARAMETER) == PARAMETERS
    assert ours["other"] == most(Category.INPUT)
    assert ours["activations"] <= most(Category.ACTIVATION)


class _Block(nn.Module):
    """Pre-norm attention and a feed-forward, as GPT-2 has them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


@pytest.fixture(scope="module")
def formula_by_accumulation(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The formula beside the bytes that one step keeps, with 1, 2 and 4 micro-batches a step."""
    return {many: _accumulated(tmp_path_factory.mktemp("accumulated"), many) for many in (1, 2, 4)}


def _accumulated(folder: Path, micro_batches: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 64), *(_Block(64, 4) for _ in range(4)), nn.LayerNorm(64)
    )
    head = nn.Linear(64, 256, bias=False)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

    def step() -> None:
        for _ in range(micro_batches):
            tokens = torch.randint(0, 256, (4, 32))
            logits = head(model(tokens)).flatten(0, 1)
            nn.functional.cross_entropy(logits, tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            record_shapes=True,
            profile_memory=True,
        ) as profiler:
            step()
        profiler.export_chrome_trace(str(folder / "trace.json"))
    calls = analyse(read_trace(folder / "trace.json")).forward_calls
    assert calls is not None
    model = find_transformer(calls)
    assert model is not None
    return transformer_activations(model, _largest(folder / "trace.json")["activations"])


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_accumulation_changes_neither_the_blocks_nor_the_formulas_error(
    formula_by_accumulation: dict[int, Any], micro_batches: int
) -> None:
    found = formula_by_accumulation[micro_batches]
    assert found.model == "transformer of 4 blocks, nothing recomputed"
    # By hand, a token: a block keeps 2·4·64 + (2·64 + 4·64 + 2·256)·4 + 4·4 = 4112 bytes, norm,
    # head and loss (4 + 4)·64 + 4·256 = 1536. Four samples of 32 tokens: 128·(4·4112 + 1536).
    assert found.total_bytes == 128 * (4 * 4112 + 1536)
    assert found.measured_bytes == pytest.approx(found.total_bytes, rel=0.02)
