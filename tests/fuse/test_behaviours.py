"""Everything that can carry behaviour trains as alone, or is refused in words."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from fuse_random import Plan, tried
from fuse_random_parts import WIDTH, Part
from stepscope.errors import StepscopeError, UsageError
from stepscope.fix.fuse import fuse
from stepscope.fix.fuse.behaviours import BEHAVIOURS, REFUSED

SAME: dict[str, list[str]] = {
    "hooks on the model and its modules": [
        "forward hook", "counting hook", "backward hook", "backward pre-hook", "hooks_module_later",
    ],
    "hooks of weight_norm and pruning": ["pruned", "old weight norm", "old spectral norm"],
    "forward of an instance": ["forward of its own"],
    "train and eval mode of some modules": ["evaluates", "freezes_itself"],
    "parametrizations": ["spectral norm", "weight norm"],
    "numbers, lists and tensors that forward keeps": [
        "counts", "lists", "appends", "keeps_hidden", "auxiliary",
    ],
    "attributes changed after fuse": ["counts_on"],
    "closures, iterators, generators and other objects": ["closure"],
    "tied weights": ["tied", "tied, alone"],
    "requires_grad changed after fuse": ["freezes", "frozen_from_the_start"],
    "weights whose data is replaced after fuse": ["replaces_data", "halves", "clamps_data"],
    "buffers written to or assigned": [
        "assigned", "assigned_shape", "averaged", "averaged_alone", "norm without weights",
    ],
    "embeddings with max_norm and padding": ["words, shortened and padded", "words, padded"],
    "hooks on weights": ["weight hook", "hooks_later"],
    "hooks on activations and on grad_fn": ["hooks_activation", "hooks_node"],
    "a tensor's requires_grad, data or grad set in forward": ["clamps_data", "clamps_weight"],
    "gradients taken in forward": ["gradient_inside", "func_grad"],
    "reentrant checkpoints": ["reentrant", "reentrant_drops"],
    "other checkpoints": ["recomputed"],
    "saved_tensors_hooks in forward": ["saved_hooks", "saves_on_cpu"],
    "autograd.Function": ["own_function"],
    "no_grad, inference_mode, detach, autocast in forward": ["no_grad", "inference", "stops"],
}  # fmt: skip
SAID: dict[str, tuple[str, str]] = {
    "train and eval mode that differs between models": ("evaluates_one", "eval mode in others"),
    "requires_grad that differs between models": ("freezes_some", "not trained"),
    "random and numpy.random in forward": ("python_random", "Python's random"),
    "weights without a shape yet": ("lazy", "Call every model once before fuse"),
    "hooks after a weight's gradient": ("hook after gradients", "between array.backward"),
}


@pytest.fixture
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def outcome(name: str, optimizer: str = "momentum") -> Any:
    from fuse_random_parts import PARTS, events

    parts = (name if name in PARTS else "counts", "linear")
    return tried(1, Plan(parts, 3, optimizer, False, (name,) if name in events else ()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("name", sorted({name for names in SAME.values() for name in names}))
def test_trains_as_alone(name: str) -> None:
    found = outcome(name)
    assert found.kind == "same", found.words


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("what", SAID)
def test_is_refused_in_words(what: str) -> None:
    name, words = SAID[what]
    found = outcome(name)
    assert found.kind == "refused"
    assert words in found.words


class Noisy(torch.Tensor):
    """A tensor with code of its own."""


def pair(make: Callable[[], nn.Module] = lambda: nn.Linear(2, 2)) -> list[nn.Module]:
    return [make() for _ in range(2)]


def sgd(models: Any, **settings: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, **settings) for model in models]


def step(array: Any, x: torch.Tensor | None = None) -> None:
    array.zero_grad()
    array.backward(array(torch.ones(3, 2) if x is None else x).square().mean())
    array.step()


def compiled_submodule() -> None:
    fuse(pair(lambda: nn.Sequential(torch.compile(nn.Linear(2, 2)))))


def in_parallel() -> None:
    fuse(pair(lambda: nn.DataParallel(nn.Linear(2, 2))))


def hook_for_all() -> None:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        fuse(pair())
    finally:
        handle.remove()


def module_made_in_forward() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.late = nn.ReLU()
            result: torch.Tensor = self.one(x)
            return result

    fuse(pair(Grows))(torch.ones(3, 2))


def weight_of_another_class() -> None:
    models = pair()
    for model in models:
        model.register_buffer("noise", torch.ones(2).as_subclass(Noisy))
    fuse(models)


def shared_between_models() -> None:
    models = pair()
    models[1].bias = models[0].bias
    fuse(models)


def shared_within_a_model() -> None:
    models = pair()
    for model in models:
        model.register_buffer("first", model.get_parameter("weight").data[0])
    fuse(models)


def sparse() -> None:
    array = fuse(pair(lambda: nn.Embedding(3, 2, sparse=True)))
    array(torch.tensor([0, 1]))


def another_weight_missing() -> None:
    models = pair()
    own = [
        torch.optim.SGD([*model.parameters()][: 1 + place]) for place, model in enumerate(models)
    ]
    fuse(models, own)


def own_step() -> None:
    models = pair()
    own = sgd(models)
    fuse(models, own)
    own[0].step()


def two_steps() -> None:
    models = pair()
    array = fuse(models, sgd(models))
    step(array)
    array.step()


REFUSALS: dict[str, list[tuple[Callable[[], None], str]]] = {
    "wrappers: DDP, DataParallel, FSDP, compiled modules": [
        (compiled_submodule, "then call array.compile"), (in_parallel, "fuse the module inside"),
    ],
    "hooks for all modules": [(hook_for_all, "hook for all modules")],
    "modules or weights made in forward": [(module_made_in_forward, "Create it in __init__")],
    "tensors of other classes and layouts": [(weight_of_another_class, "is a Noisy")],
    "memory that two tensors or models share": [
        (shared_between_models, "bias of model 0 and bias of model 1 share memory"),
        (shared_within_a_model, "share memory"),
    ],
    "sparse gradients": [(sparse, "sparse=False")],
    "an optimizer that lacks a weight of the others": [(another_weight_missing, "does not step")],
    "step of a model's own optimizer": [(own_step, "array.step()")],
    "two steps without zero_grad": [(two_steps, "array.zero_grad()")],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("act", "words"), [one for rows in REFUSALS.values() for one in rows])
def test_is_refused(act: Callable[[], None], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        act()
    assert words in str(refusal.value)


def same_as_alone(train: Callable[[Any, Any, Callable[[], None]], None]) -> None:
    """`train(models, optimizers, step)` with an array, and with each model alone."""
    models = pair()
    twins = copy.deepcopy(models)
    own = sgd(models, momentum=0.9)
    array = fuse(models, own)
    train(models, own, lambda: step(array))
    for twin in twins:
        (optimizer,) = sgd([twin], momentum=0.9)

        def alone(twin: Any = twin, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            twin(torch.ones(3, 2)).square().mean().backward()
            optimizer.step()

        train([twin], [optimizer], alone)
    for model, twin in zip(models, twins, strict=True):
        torch.testing.assert_close(model.state_dict(), twin.state_dict())


def halve_gradients(optimizer: Any, *_: Any) -> None:
    for weight in optimizer.param_groups[0]["params"]:
        weight.grad.mul_(0.5)


def hooks_of_an_optimizer(models: Any, optimizers: Any, step: Any) -> None:
    step()
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(halve_gradients)
    step()
    step()


def a_step_of_ones_own(models: Any, optimizers: Any, step: Any) -> None:
    for optimizer in optimizers:
        torch_step = optimizer.step

        def twice(torch_step: Any = torch_step) -> None:
            torch_step()
            torch_step()

        optimizer.step = twice
    step()
    step()


def a_weight_is_added(models: Any, optimizers: Any, step: Any) -> None:
    step()
    for model, optimizer in zip(models, optimizers, strict=True):
        model.bias = nn.Parameter(torch.full((2,), 0.5))
        optimizer.param_groups[0]["params"] = [model.weight]
        optimizer.add_param_group({"params": [model.bias], "lr": 0.01})
    step()
    step()


def a_state_is_loaded(models: Any, optimizers: Any, step: Any) -> None:
    step()
    saved = [copy.deepcopy(one.state_dict()) for one in optimizers]
    step()
    for optimizer, state in zip(optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    step()


FOLLOWS: dict[str, Callable[[Any, Any, Any], None]] = {
    "an optimizer's hooks": hooks_of_an_optimizer,
    "an optimizer's step or class of one's own": a_step_of_ones_own,
    "parameter groups added after fuse": a_weight_is_added,
    "modules and weights replaced or added after fuse": a_weight_is_added,
}


@pytest.mark.parametrize("train", [*FOLLOWS.values(), a_state_is_loaded])
def test_is_followed(train: Callable[[Any, Any, Any], None]) -> None:
    same_as_alone(train)


def test_an_optimizer_goes_on_from_what_it_did_before() -> None:
    models = pair()
    own = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    for place, (model, optimizer) in enumerate(zip(models, own, strict=True)):
        for _ in range(place + 1):
            model(torch.ones(3, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    twins, others = copy.deepcopy((models, own))
    array = fuse(models, own)
    for _ in range(2):
        step(array)
        for twin, optimizer in zip(twins, others, strict=True):
            optimizer.zero_grad()
            twin(torch.ones(3, 2)).square().mean().backward()
            optimizer.step()
    for model, twin in zip(models, twins, strict=True):
        torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_a_penalty_on_a_models_own_weights_counts() -> None:
    models = pair()
    twin = copy.deepcopy(models[1])
    array = fuse(models, sgd(models))
    array.backward(array(torch.ones(3, 2)).square().mean())
    models[1].get_parameter("weight").square().sum().backward()
    array.step()
    (
        twin(torch.ones(3, 2)).square().mean() + twin.get_parameter("weight").square().sum()
    ).backward()
    sgd([twin])[0].step()
    torch.testing.assert_close(models[1].state_dict(), twin.state_dict())


def test_a_tensor_of_another_class_in_forward_is_each_models() -> None:
    class Mixes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.ones(2).as_subclass(Noisy)

    models = pair(lambda: Mixes(2, 2))
    array = fuse(models)
    result = array(torch.ones(3, 2))
    torch.testing.assert_close(
        result.of(1).as_subclass(torch.Tensor),
        models[1](torch.ones(3, 2)).as_subclass(torch.Tensor),
    )
    assert list(array.report()["one_by_one"]) == [""]


def test_an_attribute_that_differs_is_each_models() -> None:
    models = pair(Part)
    for place, model in enumerate(models):
        model.seen = random.Random(place)  # type: ignore[assignment]
        model.forward = lambda x, model=model: model.one(x) * model.seen.random()  # type: ignore
    twins = copy.deepcopy(models)
    for twin in twins:
        twin.forward = lambda x, twin=twin: twin.one(x) * twin.seen.random()  # type: ignore
    array = fuse(models)
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        result = array(x)
        for place, twin in enumerate(twins):
            torch.testing.assert_close(result.of(place), twin(x))


def test_every_row_of_the_table_is_tested() -> None:
    others = {
        "attributes that differ between models", "an optimizer that has stepped before",
        "gradients that reach a model's own weights", "tensors of other classes in forward",
    }  # fmt: skip
    tested = {*SAME, *SAID, *REFUSALS, *FOLLOWS, *others}
    assert {row.what for row in BEHAVIOURS} == tested
    assert {*SAID, *REFUSALS} == {row.what for row in BEHAVIOURS if row.answer == REFUSED}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("seed", range(5000, 5016))
def test_random_nets_with_all_of_it(seed: int) -> None:
    found = tried(seed)
    assert found.kind in ("same", "refused", "fails alone"), (found.words, found.plan)


def test_a_refusal_is_an_error_of_stepscope() -> None:
    array = fuse(pair())
    with pytest.raises(StepscopeError, match=r"result\.of"):
        array(torch.ones(3, 2)).register_hook(print)
