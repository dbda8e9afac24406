"""Exact bytes where a hand can count them, and nothing of the training changed by counting."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

from stepscope.measure.memory import memory_step as memory_module
from stepscope.measure.memory import saved_tensors as saved_module
from stepscope.measure.memory import storages as storages_module
from stepscope.measure.memory.memory_step import COUNTED, MemoryStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FLOAT = 4


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    """Another test of this process may have compiled something, which changes what is watched."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
        dynamo.utils.counters.clear()


@contextlib.contextmanager
def watching(*optimizers: Any) -> Iterator[dict[str, Any]]:
    """What the session does around one step."""
    step = MemoryStep(optimizers)
    plain = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        step.phase("backward", entering=True)
        try:
            plain(*args, **kwargs)
        finally:
            step.phase("backward", entering=False)

    result: dict[str, Any] = {}
    step.begin()
    torch.autograd.backward = backward
    try:
        yield result
    finally:
        torch.autograd.backward = plain
        result.update(step.end())
        json.dumps(result)


def measured(step: Callable[[], Any], *optimizers: Any) -> dict[str, Any]:
    with watching(*optimizers) as result:
        step()
    return result


def phase(result: dict[str, Any], name: str) -> dict[str, int]:
    return next(row["categories"] for row in result["phases"] if row["phase"] == name)


def modules(result: dict[str, Any]) -> dict[str, int]:
    return {row["module"]: row["bytes"] for row in result["activations_by_module"]}


def adds_up(result: dict[str, Any]) -> None:
    """The parts that the result promises to be parts of something."""
    assert sum(modules(result).values()) == result["categories"]["activations"]
    peak = result["peak"]
    assert sum(peak["categories"][name] for name in COUNTED) == peak["known_bytes"]
    for row in result["phases"]:
        assert sum(row["categories"][name] for name in COUNTED) <= peak["known_bytes"]
        for name in COUNTED:
            assert row["categories"][name] <= result["categories"][name]


# exact bytes


def test_mlp_with_adam_is_what_the_formulas_say() -> None:
    batch, wide, inner, out = 8, 16, 32, 4
    net = nn.Sequential(nn.Linear(wide, inner), nn.ReLU(), nn.Linear(inner, out))
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.randn(batch, wide)

    def step() -> None:
        optimizer.zero_grad()
        net(x).pow(2).sum().backward()
        optimizer.step()

    step()
    result = measured(step, optimizer)
    count = wide * inner + inner + inner * out + out
    relu, last = batch * inner * FLOAT, batch * out * FLOAT
    assert result["device"] == "cpu"
    assert result["categories"] == {
        "parameters": count * FLOAT,
        "gradients": count * FLOAT,
        "optimizer": 2 * count * FLOAT + 4 * FLOAT,  # and a step count a parameter
        "activations": relu + last,  # ReLU's result serves the next layer too; pow saves its input
        "buffers": 0,
        "temporaries": None,
        "other": None,
    }
    assert modules(result) == {"1": relu, "(outside modules)": last}
    assert result["inputs_bytes"] == batch * wide * FLOAT
    assert result["inputs"] == [{"module": "Sequential", "shapes": ((batch, wide),), "calls": 1}]
    assert result["saved_bytes"] == relu + last
    assert [row["phase"] for row in result["phases"]] == [
        "begin",
        "forward",
        "backward",
        "optimizer",
    ]
    assert phase(result, "begin")["gradients"] == count * FLOAT
    assert phase(result, "forward")["gradients"] == 0  # zero_grad sets them to None
    assert phase(result, "forward")["activations"] == relu + last
    assert phase(result, "backward")["activations"] == 0
    assert phase(result, "optimizer")["gradients"] == count * FLOAT
    assert result["peak"]["allocated_bytes"] is None
    assert any("CPU allocator" in note for note in result["notes"])
    # 4 parameters with a gradient and 3 states each, seen with new gradients; 2 activations
    assert result["storages"] >= 4 * 5 + 2
    adds_up(result)


def test_batch_norm_has_buffers_and_saves_its_statistics() -> None:
    batch, wide, inner = 6, 10, 20
    net = nn.Sequential(nn.Linear(wide, inner), nn.BatchNorm1d(inner), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        net(torch.randn(batch, wide)).sum().backward()
        optimizer.step()

    step()
    result = measured(step, optimizer)
    count = wide * inner + inner + 2 * inner
    assert result["categories"]["buffers"] == 2 * inner * FLOAT + 8
    assert result["categories"]["optimizer"] == count * FLOAT
    assert modules(result) == {
        "1": (batch * inner + 2 * inner) * FLOAT,  # its input, mean and inverse deviation
        "2": batch * inner * FLOAT,
    }
    adds_up(result)


def test_batches_that_the_script_holds_for_later_are_counted_by_their_form() -> None:
    net = nn.Linear(1031, 3)
    optimizer = torch.optim.SGD(net.parameters())
    batches = [torch.randn(17, 1031) for _ in range(4)]
    another = torch.randn(1031, 17)  # no batch

    def step() -> None:
        net(batches[1]).sum().backward()
        optimizer.step()

    result = measured(step, optimizer)
    assert result["inputs_bytes"] == 17 * 1031 * FLOAT
    assert result["prepared_bytes"] == 3 * 17 * 1031 * FLOAT
    assert another.numel() == batches[0].numel()


def test_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    net = Tied()
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        net(torch.randint(50, (4, 3))).sum().backward()
        optimizer.step()

    result = measured(step, optimizer)
    assert result["categories"]["parameters"] == 50 * 8 * FLOAT
    assert result["categories"]["gradients"] == 50 * 8 * FLOAT
    assert result["inputs_bytes"] == 12 * 8
    assert modules(result) == {"embed": 4 * 3 * 8 * FLOAT} or modules(result) == {
        "head": 4 * 3 * 8 * FLOAT
    }


def test_views_of_weights_are_not_activations_and_views_of_one_activation_count_once() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    x = torch.randn(4, 8, requires_grad=True)

    def step() -> None:
        hidden = x.mm(weight.t()).exp()  # saves x, a view of weight, and exp's result
        left, right = hidden[:, :4], hidden[:, 4:]
        ((left * right).sum() + (hidden * hidden.view(4, 8)).sum()).backward()
        optimizer.step()

    result = measured(step, optimizer)
    assert result["categories"]["parameters"] == 8 * 8 * FLOAT  # no module: it is a leaf
    assert result["categories"]["activations"] == 2 * 4 * 8 * FLOAT  # x and exp(x w)
    adds_up(result)


def test_activations_belong_to_the_innermost_module_that_saved_them_first() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sigmoid()

    net = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()

    one = 2 * 4 * FLOAT
    result = measured(step, optimizer)
    assert modules(result) == {"0.inner.1": one, "0": one, "1.inner.1": one, "1": one}
    adds_up(result)


def test_several_models_and_optimizers_are_told_apart_and_counted_together() -> None:
    class Generator(nn.Linear):
        pass

    class Critic(nn.Linear):
        pass

    maker, critic = Generator(4, 4), nn.Sequential(Critic(4, 4), nn.Tanh())
    first = torch.optim.SGD(maker.parameters(), lr=0.1)
    second = torch.optim.Adam(critic.parameters())

    def step() -> None:
        fake = maker(torch.randn(8, 4)).tanh()
        critic(fake.detach()).sum().backward()
        second.step()
        first.zero_grad()
        critic(fake).sum().backward()
        first.step()

    result = measured(step, first, second)
    assert result["categories"]["parameters"] == 2 * 20 * FLOAT
    assert "Sequential.1" in modules(result)
    assert any(note.startswith("2 optimizers") for note in result["notes"])
    adds_up(result)


def test_frozen_parameters_missing_gradients_and_sparse_gradients() -> None:
    net = nn.Sequential(nn.Embedding(100, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].requires_grad_(False)
    unused = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*net[0].parameters(), *unused.parameters()], lr=0.1)

    def step() -> None:
        net(torch.tensor([1, 2, 3])).sum().backward()
        optimizer.step()

    result = measured(step, optimizer)
    assert result["categories"]["parameters"] == (400 + 20 + 20 + 20) * FLOAT
    sparse = 3 * 8 + 3 * 4 * FLOAT  # indices and values
    assert result["categories"]["gradients"] == sparse + 20 * FLOAT
    notes = " ".join(result["notes"])
    assert "4 parameters are in no optimizer" in notes
    assert "2 parameters have no gradient" in notes
    assert "sparse" in notes


def test_a_frozen_model_that_only_runs_is_there_from_the_beginning() -> None:
    net, teacher = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        x = torch.randn(3, 4)
        with torch.no_grad():
            wanted = teacher(x)
        F.mse_loss(net(x), wanted).backward()
        optimizer.step()

    result = measured(step, optimizer)
    assert phase(result, "begin")["parameters"] == (20 + 20 + 8) * FLOAT
    assert phase(result, "begin")["buffers"] == 2 * 4 * FLOAT + 8


def test_master_copies_are_optimizer_state() -> None:
    net = nn.Linear(8, 8, bias=False).bfloat16()
    master = net.weight.detach().float().requires_grad_()
    optimizer = torch.optim.SGD([master], lr=0.1)

    def step() -> None:
        net(torch.randn(2, 8).bfloat16()).sum().backward()
        master.grad = net.weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            net.weight.copy_(master)

    result = measured(step, optimizer)
    assert result["categories"]["parameters"] == 64 * 2
    assert result["categories"]["optimizer"] == 64 * 4
    assert result["categories"]["gradients"] == 64 * 4 + 64 * 2
    assert any("master copies" in note for note in result["notes"])


def test_accumulation_reports_the_largest_forward_and_everything_saved() -> None:
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        for rows in (2, 6, 4):
            net(torch.randn(rows, 4)).sum().backward()
        optimizer.step()

    result = measured(step, optimizer)
    row = 16 * FLOAT
    assert result["categories"]["activations"] == 6 * row
    assert phase(result, "forward")["activations"] == 6 * row
    assert result["saved_bytes"] == 12 * row
    adds_up(result)


def test_a_closure_runs_backward_inside_the_optimizer() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    x = torch.randn(2, 4)

    def closure() -> float:
        optimizer.zero_grad()
        loss = net(x).pow(2).sum()
        loss.backward()
        return float(loss.detach())

    result = measured(lambda: optimizer.step(closure), optimizer)
    assert result["categories"]["activations"] == 2 * 8 * FLOAT
    assert result["categories"]["optimizer"] > 0
    assert len(result["phases"]) == 4
    adds_up(result)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_lowers_what_lives_together(reentrant: bool) -> None:
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)
    )
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)

    def step(*, checkpointed: bool) -> None:
        x = torch.randn(512, 16, requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
        x.sum().backward()
        optimizer.step()

    plain = measured(lambda: step(checkpointed=False), optimizer)
    saver = measured(lambda: step(checkpointed=True), optimizer)
    assert saver["categories"]["activations"] < plain["categories"]["activations"] / 1.5
    adds_up(plain)
    adds_up(saver)
    if reentrant:  # what the recomputation saves is seen by the backward pass inside
        assert saver["saved_bytes"] > saver["categories"]["activations"]
    else:
        assert any("saved-tensor hooks" in note for note in saver["notes"])


# nothing of the training changes


def mlp() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4))
    return net, lambda: F.cross_entropy(net(torch.randn(8, 8)), torch.randint(4, (8,)))


def cnn() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )
    return net, lambda: net(torch.randn(4, 3, 8, 8)).pow(2).mean()


def lstm() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    net = nn.LSTM(6, 12, num_layers=2, dropout=0.1)
    return net, lambda: net(torch.randn(5, 3, 6))[0].pow(2).mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def transformer() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    net = nn.Sequential(nn.Embedding(30, 16), Attention(), Attention(), nn.Linear(16, 30))

    def loss() -> torch.Tensor:
        tokens = torch.randint(30, (2, 9))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return net, loss


def checkpointed() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    net = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4))

    def loss() -> torch.Tensor:
        x = torch.randn(4, 8, requires_grad=True)
        for place, block in enumerate(net):
            x = checkpoint(block, x, use_reentrant=place % 2 == 0)
        return x.pow(2).mean()

    return net, loss


def offloaded() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def loss() -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return net(torch.randn(4, 8)).pow(2).mean()

    return net, loss


def functional() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    net = nn.Linear(8, 1)

    def loss() -> torch.Tensor:
        weights = dict(net.named_parameters())

        def one(row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(net, weights, row).tanh().sum()

        return torch.func.vmap(torch.func.grad(one))(torch.randn(4, 8)).pow(2).sum()

    return net, loss


def penalised() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss() -> torch.Tensor:
        x = torch.randn(4, 8, requires_grad=True)
        value = net(x).sum()
        value.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return slope.pow(2).sum()

    return net, loss


BUILDS = (mlp, cnn, lstm, transformer, checkpointed, offloaded, functional, penalised)


def trained(build: Callable[[], Any], *, watched: bool) -> tuple[list[Any], list[str]]:
    """Losses, parameters and the random state after a few steps, the third of them watched."""
    torch.manual_seed(7)
    net, loss_of = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    seen: list[Any] = []
    notes: list[str] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().clone())

    for number in range(5):
        if watched and number == 2:
            result = measured(step, optimizer)
            notes = result["notes"]
            adds_up(result)
        else:
            step()
    seen += [value.clone() for value in net.state_dict().values()]
    return [*seen, torch.get_rng_state()], notes


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # no bf16 in this CPU: slow, not wrong
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_losses_parameters_and_random_state_are_the_same_bit_for_bit(build: Any) -> None:
    bare, _ = trained(build, watched=False)
    seen, notes = trained(build, watched=True)
    assert len(bare) == len(seen)
    assert all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))
    assert not [note for note in notes if "Error" in note]


def inplace_on_saved() -> torch.Tensor:
    x = torch.randn(4, requires_grad=True)
    hidden = x.exp()
    hidden.add_(1)
    return hidden.sum()


def freed_graph() -> torch.Tensor:
    x = torch.randn(4, requires_grad=True)
    loss = x.exp().sum()
    loss.backward()
    return loss


def detached_in_place() -> torch.Tensor:
    x = torch.randn(4, requires_grad=True)
    hidden = x.tanh()
    loss = (hidden * x).sum()
    hidden.detach_()
    return loss


@pytest.mark.parametrize("broken", [inplace_on_saved, freed_graph, detached_in_place])
def test_errors_of_the_script_are_the_same_word_for_word(broken: Any) -> None:
    optimizer = torch.optim.SGD([torch.randn(1, requires_grad=True)], lr=0.1)

    def message() -> str:
        with pytest.raises(RuntimeError) as raised:
            broken().backward()
        return str(raised.value)

    bare = message()
    with watching(optimizer) as result:
        assert message() == bare
    assert result["schema"] == 1


def test_custom_functions_get_the_very_tensors_they_saved() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            ctx.mask = x > 0
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            same.append(weight is scale and weight.mark == "kept")
            return grad * weight * ctx.mask, (grad * x).sum(0)

    same: list[bool] = []
    scale = nn.Parameter(torch.randn(8))
    scale.mark = "kept"
    optimizer = torch.optim.SGD([scale], lr=0.1)

    def step() -> None:
        Scale.apply(torch.randn(4, 8), scale).sum().backward()
        optimizer.step()

    result = measured(step, optimizer)
    assert same == [True]
    assert result["categories"]["activations"] == 4 * 8 * FLOAT + 4 * 8  # the input and the mask


def test_the_hooks_of_the_script_run_as_often_as_without_us() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    calls: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pack")
        return tensor.detach()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("unpack")
        return tensor

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = net(torch.randn(2, 4)).sum()
        loss.backward()
        optimizer.step()

    step()
    bare, calls[:] = calls.copy(), []
    inside = measured(step, optimizer)
    assert calls == bare
    assert inside["categories"]["activations"] == 0
    calls.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):  # around all of it
        net(torch.randn(2, 4)).sum().backward()
        bare, calls[:] = calls.copy(), []
        with watching(optimizer):
            net(torch.randn(2, 4)).sum().backward()
    assert calls == bare


def test_compiled_code_is_not_compiled_again() -> None:
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    compiled = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled(torch.ones(4, 8)).sum().backward()
        optimizer.step()

    try:
        step()
        frames = dict(torch._dynamo.utils.counters["frames"])
        result = measured(step, optimizer)
        assert dict(torch._dynamo.utils.counters["frames"]) == frames
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    # tanh's result for the next layer's weight, and the batch, which cannot be told apart
    assert result["categories"]["activations"] == (4 * 32 + 4 * 8) * FLOAT
    assert any("torch.compile" in note for note in result["notes"])
    assert result["inputs"] == [{"module": "Sequential", "shapes": ((4, 8),), "calls": 1}]
    assert "stepscope" not in torch._dynamo.eval_frame.OptimizedModule.__call__.__module__


# nothing is left behind


def hooks() -> tuple[Any, ...]:
    return (
        torch.autograd._engine_run_backward,
        torch._C._autograd._push_saved_tensors_default_hooks,
        torch._C._autograd._pop_saved_tensors_default_hooks,
        dict(module_hooks._global_forward_pre_hooks),
        dict(module_hooks._global_forward_hooks),
        dict(module_hooks._global_forward_hooks_always_called),
        dict(module_hooks._global_forward_hooks_with_kwargs),
    )


def test_every_hook_is_gone_afterwards_also_when_the_script_raises() -> None:
    class Fails(nn.Module):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            raise ValueError("the script's own")

    net = nn.Sequential(nn.Linear(4, 4), Fails())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = hooks()

    def inside() -> dict[str, Any]:
        with watching(optimizer) as result:
            assert hooks() != before
            with pytest.raises(ValueError, match="the script's own"):
                net(torch.randn(2, 4))
            net[0](torch.randn(2, 4)).tanh().sum().backward()
        return result

    result = inside()
    assert hooks() == before
    assert modules(result) == {"(outside modules)": 2 * 4 * FLOAT}


def test_a_wrapper_put_around_ours_is_not_torn_away() -> None:
    optimizer = torch.optim.SGD([torch.randn(1, requires_grad=True)], lr=0.1)
    original = torch.autograd._engine_run_backward
    with watching(optimizer):
        ours = torch.autograd._engine_run_backward

        def theirs(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs)

        torch.autograd._engine_run_backward = theirs
    try:
        assert torch.autograd._engine_run_backward is theirs
        torch.randn(2, requires_grad=True).sum().backward()
    finally:
        torch.autograd._engine_run_backward = original


def test_nothing_is_kept_alive() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    died: list[str] = []
    gc.collect()
    gc.disable()
    try:
        with watching(optimizer):
            hidden = net(torch.randn(4, 8))
            weakref.finalize(hidden, died.append, "tensor")
            weakref.finalize(hidden.untyped_storage(), died.append, "storage")
            loss = hidden.exp().sum()
            del hidden
            loss.backward()
            del loss
            assert sorted(died) == ["storage", "tensor"]  # inside the step, without a collection
            dropped = net(torch.randn(4, 8)).exp()  # a graph that never sees backward
            weakref.finalize(dropped.untyped_storage(), died.append, "dropped")
            del dropped
            assert "dropped" in died
            step_modules = weakref.ref(net)
        del net, optimizer
        assert step_modules() is None
    finally:
        gc.enable()


def test_a_graph_from_before_the_step_is_left_alone() -> None:
    weight = torch.randn(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    old = weight.exp()
    result = measured(lambda: old.sum().backward(), optimizer)
    assert result["categories"]["activations"] == 0


def test_modules_in_another_thread_do_no_harm() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        outputs: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: outputs.append(net(torch.randn(2, 4))))
        thread.start()
        thread.join()
        outputs[0].sum().backward()
        optimizer.step()

    for _ in range(3):
        result = measured(step, optimizer)
    assert modules(result) == {"1": 2 * 4 * FLOAT}


# our own failures


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (memory_module.Model, "find_roots"),
        (memory_module.Model, "held"),
        (memory_module.Model, "names"),
        (memory_module.Model, "add_root"),
        (memory_module.Model, "remarks"),
        (memory_module.MemoryStep, "_peak"),
        (memory_module.MemoryStep, "_watch_allocator"),
        (memory_module.MemoryStep, "_watch_graph"),
        (saved_module.SavedTensors, "read"),
        (saved_module.SavedTensors, "_open"),
        (saved_module.ThreadHistory, "mark"),
        (saved_module.ThreadHistory, "hooks"),
        (storages_module, "_piece"),
    ],
)
def test_whatever_fails_inside_is_noted_and_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise LookupError("ours")

    monkeypatch.setattr(owner, name, broken)
    bare, _ = trained(checkpointed, watched=False)
    before = hooks()
    torch.manual_seed(7)
    net, loss_of = checkpointed()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step()
    with watching(optimizer) as result:
        assert torch.equal(step(), bare[1])
    assert hooks() == before
    assert any("LookupError" in note for note in result["notes"])


def test_an_optimizer_without_anything_is_no_trouble() -> None:
    result = measured(lambda: None)
    assert result["categories"]["parameters"] == 0
    assert "forward was not seen in this step" in result["notes"]


def test_tensors_on_meta_hold_nothing() -> None:
    net = nn.Linear(4, 4, device="meta")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    result = measured(lambda: None, optimizer)
    assert result["categories"]["parameters"] == 0
    assert any("meta" in note for note in result["notes"])


def test_a_sharded_parameter_counts_this_ranks_part() -> None:
    class Shard(torch.Tensor):
        """As DTensor presents itself: a wrapper that names its inner tensor."""

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, (inner.numel() * 8,))
            made.inner, made.mesh = inner, "a mesh"
            return made

        def __tensor_flatten__(self) -> Any:
            return ["inner", "mesh"], None

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise NotImplementedError

    notes: set[str] = set()
    found = list(storages_module.pieces(Shard(torch.zeros(5)), notes))
    assert [piece.size_bytes for piece in found] == [5 * FLOAT]
    assert not notes
