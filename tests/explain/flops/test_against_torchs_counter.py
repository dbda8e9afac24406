"""FLOPs read from a trace, against torch's own counter running inside the model.

They are equal to the last FLOP wherever that counter knows the operator. It counts the weight
gradient of a grouped convolution once for each group too often; that is pinned here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from .recording import counted_names, flops_of, record, torch


class Attention(nn.Module):
    """Heads by hand, so that every product is a batched matmul."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1)
        if self.causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -1e9)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=causal)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """Embeddings, two causal blocks, logits; with causal=False and no shift, a small BERT."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(50, 24), nn.Embedding(10, 24)
        self.blocks = nn.Sequential(*(Block(24, 3, causal=causal) for _ in range(2)))
        self.head = nn.Linear(24, 50, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(x))


class Matmuls(nn.Module):
    """Every way to write a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5, 6, 3))

    def forward(self, x: Any) -> Any:
        many = torch.matmul(self.a, self.b)  # broadcast over the batch
        added = torch.baddbmm(torch.zeros(5, 4, 3), self.a.expand(5, 4, 6), self.b)
        summed = torch.einsum("bij,ik->bjk", many + added, x)
        return torch.addmm(torch.zeros(4, 4), self.a, self.a.t()).sum() + summed.sum()


def convolutions() -> nn.Module:
    """One, two and three dimensions, with strides, padding, dilation and transposed."""
    return nn.Sequential(
        nn.Conv1d(3, 6, 5, stride=2, padding=2, dilation=2),
        nn.ConvTranspose1d(6, 4, 4, stride=3, padding=1, output_padding=1),
        nn.Unflatten(2, (6, 8)),
        nn.Conv2d(4, 8, (3, 2), stride=(1, 2), padding=(1, 0)),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 5, 3, stride=2, dilation=2, bias=False),
        nn.Unflatten(1, (1, 5)),
        nn.Conv3d(1, 2, (1, 3, 3), padding="same"),
        nn.ConvTranspose3d(2, 1, 2, stride=(1, 2, 1)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 12, bias=False), nn.Tanh())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (mlp, lambda: torch.randn(5, 7)),
    "mlp on sequences": (mlp, lambda: torch.randn(2, 5, 7)),
    "matmuls": (Matmuls, lambda: torch.randn(4, 2)),
    "convolutions": (convolutions, lambda: torch.randn(2, 3, 36)),
    "gpt": (lambda: Gpt(causal=True), lambda: torch.randint(50, (2, 9))),
    "bert": (lambda: Gpt(causal=False), lambda: torch.randint(50, (2, 9))),
}


def torchs_count(run: Callable[[], Any], backward: bool) -> int:
    with FlopCounterMode(display=False) as counter:
        out = run()
        if backward:
            out.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_flops_equal_torchs_counter(name: str, tmp_path: Path) -> None:
    make, draw = MODELS[name]
    torch.manual_seed(0)
    model, given = make(), draw()
    _, costs = record(tmp_path / "trace.json", lambda: model(given).sum().backward())
    forward = torchs_count(lambda: model(given), backward=False)
    both = torchs_count(lambda: model(given), backward=True)
    assert forward > 0
    assert flops_of(costs, "forward") == forward
    assert flops_of(costs, "backward") == both - forward
    assert flops_of(costs) == both


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_grouped_convolutions_cost_what_one_group_costs_times_their_number(
    dimensions: int, transposed: bool, tmp_path: Path
) -> None:
    groups, kind = 2, f"Conv{'Transpose' if transposed else ''}{dimensions}d"
    layer = getattr(nn, kind)(4, 6, 3, groups=groups, stride=2, dilation=2, padding=1)
    given = torch.randn(2, 4, *([9] * dimensions), requires_grad=True)
    _, costs = record(tmp_path / "trace.json", lambda: layer(given).sum().backward())
    points = given[0, 0].numel() if transposed else layer(given)[0, 0].numel()
    forward = 2 * 2 * points * (4 // groups) * (6 // groups) * groups * 3**dimensions
    assert flops_of(costs, "forward") == forward
    assert flops_of(costs, "backward") == 2 * forward
    assert torchs_count(lambda: layer(given), backward=False) == forward
    # Gradient of the input as here; gradient of the weight as if there were no groups.
    both = torchs_count(lambda: layer(given), backward=True)
    assert both - forward == forward + groups * forward


def test_a_convolutions_first_layer_needs_no_gradient_of_its_input(tmp_path: Path) -> None:
    layer, given = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)
    _, costs = record(tmp_path / "trace.json", lambda: layer(given).sum().backward())
    assert flops_of(costs, "forward") == flops_of(costs, "backward") == 2 * 36 * 4 * 27


@pytest.mark.parametrize(("causal", "keys"), [(False, 7), (True, 5)])
def test_fused_attention_is_counted_as_torchs_counter_counts_it_on_other_devices(
    causal: bool, keys: int, tmp_path: Path
) -> None:
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q = torch.randn(2, 3, 5, 8, requires_grad=True)
    k, v = (torch.randn(2, 3, keys, 8, requires_grad=True) for _ in range(2))
    trace, costs = record(
        tmp_path / "trace.json",
        lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward(),
    )
    names = counted_names(trace, costs)
    assert names == {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    }
    assert flops_of(costs, "forward") == sdpa_flop_count(q.shape, k.shape, v.shape)
    backward = sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)
    assert flops_of(costs, "backward") == backward
    # Without its scores computed again, backward is twice forward.
    model = costs.model_flops[costs.counted].sum()
    assert model == 3 * flops_of(costs, "forward")


def test_attention_by_plain_products_counts_those(tmp_path: Path) -> None:
    q = torch.randn(2, 3, 5, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        trace, costs = record(
            tmp_path / "trace.json", lambda: functional.scaled_dot_product_attention(q, q, q)
        )
    assert counted_names(trace, costs) == {"aten::bmm"}
    assert flops_of(costs) == 2 * 2 * 2 * 3 * 5 * 5 * 8


def test_lstm_meets_every_weight_once_for_each_row(tmp_path: Path) -> None:
    time, batch, wide, hidden = 5, 3, 6, 8
    layer = nn.LSTM(wide, hidden, num_layers=2, bidirectional=True)
    given = torch.randn(time, batch, wide, requires_grad=True)
    state = tuple(torch.zeros(4, batch, hidden, requires_grad=True) for _ in range(2))
    trace, costs = record(tmp_path / "trace.json", lambda: layer(given, state)[0].sum().backward())
    first, second = 4 * hidden * (wide + hidden), 4 * hidden * (2 * hidden + hidden)
    forward = 2 * time * batch * 2 * (first + second)
    assert flops_of(costs, "forward") == forward
    assert flops_of(costs, "backward") == 2 * forward
    assert counted_names(trace, costs) <= {
        "aten::mkldnn_rnn_layer",
        "aten::mkldnn_rnn_layer_backward",
        "aten::mm",
        "aten::addmm",
    }


def test_gru_is_counted_by_its_products(tmp_path: Path) -> None:
    time, batch, wide, hidden = 4, 3, 6, 5
    layer = nn.GRU(wide, hidden)
    given = torch.randn(time, batch, wide, requires_grad=True)
    state = torch.zeros(1, batch, hidden, requires_grad=True)
    _, costs = record(tmp_path / "trace.json", lambda: layer(given, state)[0].sum().backward())
    forward = 2 * time * batch * 3 * hidden * (wide + hidden)
    assert flops_of(costs, "forward") == forward
    assert flops_of(costs, "backward") == 2 * forward


def test_vectors_count_too_though_torchs_counter_leaves_them_out(tmp_path: Path) -> None:
    matrix, vector = torch.randn(4, 7), torch.randn(7)
    trace, costs = record(
        tmp_path / "trace.json",
        lambda: (
            torch.mv(matrix, vector),
            torch.dot(vector, vector),
            torch.addmv(matrix[:, 0], matrix, vector),
        ),
    )
    assert counted_names(trace, costs) == {"aten::addmv_", "aten::dot", "aten::addmv"}
    assert flops_of(costs) == 2 * 4 * 7 + 2 * 7 + 2 * 4 * 7


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_forward_is_found_and_kept_out_of_the_models_flops(
    reentrant: bool, tmp_path: Path
) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    first, second = mlp(), nn.Linear(12, 3)
    given = torch.randn(5, 7, requires_grad=True)

    def train() -> Any:
        return second(checkpoint(first, given, use_reentrant=reentrant))

    _, costs = record(tmp_path / "trace.json", lambda: train().sum().backward())
    checkpointed = torchs_count(lambda: first(given), backward=False)
    plain = torchs_count(lambda: second(first(given)), backward=True)
    again = costs.counted & costs.recomputed
    assert int(costs.flops[again].sum()) == checkpointed
    assert flops_of(costs) == plain + checkpointed
    assert int(costs.model_flops[costs.counted].sum()) == plain


def test_a_kept_graph_of_gradients_is_not_taken_for_recomputation(tmp_path: Path) -> None:
    layer = nn.Linear(6, 6, bias=False)
    given = torch.randn(6, 6, requires_grad=True)

    def penalise() -> None:
        (gradient,) = torch.autograd.grad(layer(given).sum(), given, create_graph=True)
        del gradient

    _, costs = record(tmp_path / "trace.json", penalise)
    assert flops_of(costs, "backward") > 0
    assert not costs.recomputed.any()


def test_the_innermost_of_nested_operators_counts_once(tmp_path: Path) -> None:
    layer, given = nn.Linear(3, 4), torch.randn(2, 3)
    trace, costs = record(tmp_path / "trace.json", lambda: layer(given))
    assert counted_names(trace, costs) == {"aten::addmm"}
    linear = next(
        row
        for row in range(len(trace.host))
        if trace.strings[trace.host.name[row]] == "aten::linear"
    )
    assert costs.flops[linear] == 2 * 2 * 3 * 4
    assert not costs.counted[linear]


def test_without_shapes_products_are_unknown_and_not_zero(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.mm(torch.randn(3, 3), torch.randn(3, 3))
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    from stepscope import read_trace
    from stepscope.explain.flops.costs import count_costs

    trace = read_trace(tmp_path / "trace.json", cache=False)
    costs = count_costs(trace)
    rows = [row for row, code in enumerate(trace.host.name) if trace.strings[code] == "aten::mm"]
    assert costs.flops[rows].tolist() == [-1]
    assert not costs.counted.any()
