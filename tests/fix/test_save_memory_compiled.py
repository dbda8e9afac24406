"""save_memory on compiled models: backward's graph recomputes, with the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.fix import save_memory
from stepscope.fix.saved import SavePlan

# Torch warns about itself while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore")
inductor = pytest.importorskip("torch._inductor.config")
if not hasattr(inductor, "custom_partitioner_fn"):
    pytest.skip("this torch has no custom_partitioner_fn", allow_module_level=True)
STEPS = 3


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of a GPU make the plans independent of this machine."""
    from stepscope.fix.saved.compiled import operator_costs

    monkeypatch.setattr(operator_costs, "_measure", lambda *_given: ({}, 4000.0))
    monkeypatch.setitem(operator_costs._RATE, "cpu", 400_000.0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A transformer's block with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        query, key, value = (
            self.qkv(self.norm(x)).view(samples, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(16) for _ in range(3)])
        self.convolutions = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)])
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.first(x)), 2)
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            x = functional.relu(norm(convolution(x)) + x)
        return self.last(x.mean((2, 3)))


INPUTS = {Transformer: (8, 64, 64), Pictures: (8, 3, 32, 32)}


def train(
    kind: type[nn.Module],
    attach: Callable[[nn.Module], Any] = lambda _model: None,
    *,
    bf16: bool = True,
    calls: int = 1,
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Return losses, weights and what `attach` returned."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind()
    model.compile()
    saver = attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    x = torch.randn(INPUTS[kind])
    precision = torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with precision:
            loss = sum(model(x + number).float().square().mean() for number in range(calls))
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(float(loss))
    return losses, [weight.detach().clone() for weight in model.parameters()], saver


def same(first: tuple[list[float], list[torch.Tensor], Any], second: Any) -> bool:
    return first[0] == second[0] and all(map(torch.equal, first[1], second[1]))


@pytest.mark.parametrize("kind", [Transformer, Pictures])
@pytest.mark.parametrize("bf16", [True, False])
def test_training_is_the_same_to_the_last_bit(kind: type[nn.Module], bf16: bool) -> None:
    plain = train(kind, bf16=bf16)
    planned = train(kind, save_memory, bf16=bf16)
    saver = planned[2]
    assert same(plain, planned)
    assert saver.ended is None
    assert saver.notes == []
    assert saver.plan.changes_something()
    assert saver.plan.saved_bytes < 0.75 * saver.plan.saved_bytes_before
    assert saver.plan.peak_bytes < saver.plan.peak_bytes_before
    assert saver.settled


def test_gradients_of_several_passes_add_up_the_same() -> None:
    assert same(train(Transformer, calls=2), train(Transformer, save_memory, calls=2))


def test_backward_holds_what_the_plan_says() -> None:
    """Bytes of saved tensors, without weights, as autograd sees them."""

    def saved(attach: Callable[[nn.Module], Any]) -> tuple[int, Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Transformer()
        model.compile()
        saver = attach(model)
        owned = {weight.untyped_storage()._cdata for weight in model.parameters()}
        x = torch.randn(INPUTS[Transformer], requires_grad=True)
        nodes, bytes_of = [model(x).grad_fn], dict[int, int]()
        while nodes:
            node = nodes.pop()
            for tensor in getattr(node, "saved_tensors", ()):
                storage = tensor.untyped_storage()
                if storage._cdata not in owned | {x.untyped_storage()._cdata}:
                    bytes_of[storage._cdata] = storage.nbytes()
            nodes += [
                following for following, _slot in node.next_functions if following is not None
            ]
        return sum(bytes_of.values()), saver

    before, _none = saved(lambda _model: None)
    after, saver = saved(save_memory)
    plan = saver.plan
    assert before == pytest.approx(plan.saved_bytes_before, rel=0.03)
    assert after == pytest.approx(plan.saved_bytes, rel=0.03)


def test_more_time_never_gives_a_larger_peak() -> None:
    saver = train(Transformer, lambda model: save_memory(model, max_slowdown=0.05))[2]
    peaks = [point.peak_bytes for point in saver.plan.ladder]
    assert len(peaks) > 5
    assert peaks == sorted(peaks, reverse=True)
    assert saver.plan.slowdown <= 0.05
    assert peaks[-1] <= saver.plan.peak_bytes <= saver.plan.peak_bytes_before


@pytest.mark.parametrize(
    ("target", "most"),
    [({"reduce": 0.4}, 0.6), ({"batch": "1.3x"}, None), ({"budget": "3MB"}, None)],
)
def test_a_limit_of_memory_is_met_in_the_least_time(target: Any, most: float | None) -> None:
    saver = train(Transformer, lambda model: save_memory(model, **target))[2]
    least = train(Transformer, save_memory)[2]
    plan = saver.plan
    if most is not None:
        assert plan.saved_bytes <= most * plan.saved_bytes_before
    elif "batch" in target:
        assert plan.peak_bytes <= plan.peak_bytes_before / 1.3
    else:
        assert plan.peak_bytes <= 3_000_000
    assert plan.extra_ns <= least.plan.extra_ns


def test_a_dry_run_plans_and_changes_nothing() -> None:
    plain = train(Transformer)
    dry = train(Transformer, lambda model: save_memory(model, dry_run=True))
    saver = dry[2]
    assert same(plain, dry)
    assert saver.promise.peak_bytes < saver.promise.peak_bytes_before
    low, high = saver.promise.step_low_ns, saver.promise.step_high_ns
    assert low < saver.promise.step_ns < high
    assert SavePlan.from_json(saver.plan.to_json()) == saver.plan


def test_compile_true_compiles_the_model() -> None:
    model = Transformer()
    saver = save_memory(model, compile=True)
    model(torch.randn(INPUTS[Transformer])).square().mean().backward()
    assert saver.plan.changes_something()


def test_rounding_frees_more_and_trains_alike() -> None:
    exact = train(Transformer, save_memory)
    rounded = train(Transformer, lambda model: save_memory(model, rounding=True))
    assert rounded[2].plan.saved_bytes < exact[2].plan.saved_bytes
    assert rounded[0] == pytest.approx(exact[0], rel=1e-3)


def test_settings_of_the_compiler_are_restored() -> None:
    import torch._functorch.config as functorch

    before = inductor.custom_partitioner_fn, functorch.enable_autograd_cache
    model = Transformer()
    model.compile()
    saver = save_memory(model)
    with pytest.raises(Exception, match=r"."):
        model(torch.ones(3, 5))
    assert (inductor.custom_partitioner_fn, functorch.enable_autograd_cache) == before
    saver.remove()
    torch._dynamo.reset()
    model(torch.randn(INPUTS[Transformer])).square().mean().backward()
    assert saver.plan is None


STAGES = (
    "joint_graph.read_joint_graph",
    "operator_costs.set_costs",
    "recompute_ladder.RecomputeLadder.__init__",
    "recompute_ladder.RecomputeLadder.choose",
    "recompute_ladder.RecomputeLadder.points",
    "partitioner.split_again",
    "graph_plan.describe",
)


@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_while_planning_leaves_the_compilers_own_graphs(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope.fix.saved.compiled import partitioner, recompute_ladder

    def fail(*_given: Any, **_options: Any) -> Any:
        raise ValueError("planted")

    place: Any = partitioner
    name = stage.split(".", 1)[1]
    if "." in name:
        place, name = recompute_ladder.RecomputeLadder, name.split(".")[1]
    monkeypatch.setattr(place, name, fail)
    plain = train(Pictures)
    planned = train(Pictures, save_memory)
    assert same(plain, planned)
    assert planned[2].plan is None
    assert "planted" in planned[2].notes[0]


def test_dynamic_shapes_are_planned() -> None:
    def gradients(attach: Callable[[nn.Module], Any]) -> tuple[list[torch.Tensor], Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Transformer().eval()
        model.compile(dynamic=True)
        saver = attach(model)
        for samples in (4, 6):
            model(torch.randn(samples, 32, 64)).square().mean().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None], saver

    plain, _none = gradients(lambda _model: None)
    planned, saver = gradients(save_memory)
    assert all(map(torch.equal, plain, planned))
    assert saver.plan.changes_something()


@pytest.mark.parametrize("option", [{"lossy": "bf16"}, {"plan": "given"}])
def test_what_compiled_models_cannot_do_is_refused(option: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    if "plan" in option:
        eager = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        saver = save_memory(eager, warmup=0, dry_run=True)
        eager(torch.ones(2, 2)).sum().backward()
        option = {"plan": saver.plan}
    model.compile()
    with pytest.raises(UsageError, match="compiled model"):
        save_memory(model, **option)


def test_rounding_needs_a_compiled_model() -> None:
    with pytest.raises(UsageError, match="compile=True"):
        save_memory(nn.Linear(2, 2), rounding=True)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_model_whose_graphs_cannot_be_planned_says_so(backend: str) -> None:
    model = Transformer()
    model.compile(backend=backend)
    if backend == "inductor":
        model(torch.randn(INPUTS[Transformer]))
    saver = save_memory(model)
    model(torch.randn(INPUTS[Transformer])).square().mean().backward()
    assert saver.plan is None
    assert "no graph was planned" in saver.notes[0]
