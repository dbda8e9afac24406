"""A model's parameters from its backward passes, however many of them a step has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from ddp_steps import ENGINE, LAYERS, accumulate, cpu_trace

from benches import analyse
from explain.build import AUTOGRAD, WORKER, note, op, step, write
from stepscope import read_trace
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.predict.step_context import find_parameters

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from explain.build import Events
    from stepscope.predict.step_context import Parameters
    from stepscope.records.trace import Trace

HEAD, LAYER = [10], [64, 64]
DISCRIMINATOR = [[1], [32, 8]]
GENERATOR = [[8], [8, 4]]


def shapes(found: Parameters | None) -> list[list[int]]:
    assert found is not None
    assert found.tensors == len(found.shapes)
    return sorted(map(list, found.shapes))


def backward(start: float, gradients: list[list[int]], *, thread: int = AUTOGRAD) -> Events:
    """A forward operator of 10 µs, then a node of 20 and a gradient for each."""
    events = op("aten::linear", start=start, dur=10)
    for number, shape in enumerate(gradients):
        at = start + 20 + 50 * number
        events += op(ENGINE + "AddmmBackward0", start=at, dur=20, thread=thread, forward_thread=1)
        events += accumulate(at + 20, shape, thread=thread)
    return events


def update(start: float) -> Events:
    return note("Optimizer.step#Adam.step", start=start, dur=50) + op(
        "aten::add_", start=start, dur=50
    )


def steps_of(folder: Path, *parts: Callable[[float], Events], times: int = 3) -> Trace:
    """Parts of a step 1000 µs apart, and the whole several times."""
    events: Events = []
    for number in range(times):
        begin = number * 1000.0 * len(parts)
        events += step(number, start=begin, dur=1000 * len(parts))
        for place, part in enumerate(parts):
            events += part(begin + 1000 * place)
    return read_trace(write(folder / "made.json", events, device=None), cache=False)


def passing(*gradients: list[int], **how: Any) -> Callable[[float], Events]:
    return lambda start: backward(start, [*gradients], **how)


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_micro_batches_bring_the_same_parameters_again(tmp_path: Path, micro_batches: int) -> None:
    trace = cpu_trace(tmp_path, [512, 512], steps=3, micro_batches=micro_batches)
    found = find_parameters(analyse(trace))
    assert shapes(found) == [[512, 512]] * LAYERS
    assert found is not None
    assert found.elements == LAYERS * 512 * 512


def test_layers_alike_in_one_pass_are_as_many_parameters(tmp_path: Path) -> None:
    trace = steps_of(tmp_path, passing(HEAD, LAYER, LAYER, LAYER), update)
    assert shapes(find_parameters(analyse(trace))) == [HEAD, LAYER, LAYER, LAYER]


def test_what_a_checkpoint_runs_again_inside_backward_ends_no_pass(tmp_path: Path) -> None:
    def recomputing(start: float) -> Events:
        events = backward(start, [LAYER, LAYER, LAYER])
        for at in (start + 20, start + 70, start + 120):
            events += op("aten::linear", start=at + 5, dur=5, thread=AUTOGRAD)
        return events

    trace = steps_of(tmp_path, recomputing, update)
    assert shapes(find_parameters(analyse(trace))) == [LAYER] * 3


def test_a_loaders_thread_that_works_during_backward_ends_no_pass(tmp_path: Path) -> None:
    def loading(start: float) -> Events:
        events = [event for at in range(3) for event in op("aten::add", start=start + at, dur=1)]
        events += op("aten::pin_memory", start=start + 65, dur=3, thread=WORKER)
        return events + backward(start + 5, [LAYER, LAYER])

    trace = steps_of(tmp_path, loading, update)
    assert shapes(find_parameters(analyse(trace))) == [LAYER] * 2


def test_a_generator_is_trained_through_its_discriminator(tmp_path: Path) -> None:
    """Real and fake images for the discriminator, one step of it; then the generator's loss goes
    back through the discriminator, whose gradients come first."""
    trace = steps_of(
        tmp_path,
        passing(*DISCRIMINATOR),
        passing(*DISCRIMINATOR),
        update,
        passing(*DISCRIMINATOR, *GENERATOR),
        update,
    )
    assert shapes(find_parameters(analyse(trace))) == sorted(DISCRIMINATOR + GENERATOR)


def test_two_networks_of_one_kind_with_a_step_each_are_two(tmp_path: Path) -> None:
    trace = steps_of(tmp_path, passing(HEAD, LAYER), update, passing(HEAD, LAYER), update)
    assert shapes(find_parameters(analyse(trace))) == [HEAD, HEAD, LAYER, LAYER]


def test_networks_that_share_some_shapes_are_both_counted(tmp_path: Path) -> None:
    trace = steps_of(tmp_path, passing(HEAD, LAYER), passing([3], LAYER), update)
    assert shapes(find_parameters(analyse(trace))) == [[3], HEAD, LAYER, LAYER]


def test_without_shapes_or_backward_nothing_is_told(tmp_path: Path) -> None:
    assert find_parameters(analyse(steps_of(tmp_path, update))) is None
    steps_of(tmp_path, passing(HEAD), update)
    file = tmp_path / "made.json"
    file.write_text(file.read_text().replace('"Input Dims"', '"Nothing"'))
    assert find_parameters(analyse(read_trace(file, cache=False))) is None


# As PyTorch records it


def recorded(file: Path, train: Callable[[], None], steps: int = 3) -> RankAnalysis:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(steps):
            train()
            profiler.step()
    profiler.export_chrome_trace(str(file))
    return analyse(read_trace(file, cache=False))


def elements(*models: Any) -> int:
    return sum(each.numel() for model in models for each in model.parameters())


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_model_trained_in_micro_batches_has_the_parameters_torch_counts(
    tmp_path: Path, checkpoints: bool
) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    blocks = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.01)

    def run(block: Any, hidden: Any) -> Any:
        return checkpoint(block, hidden, use_reentrant=False) if checkpoints else block(hidden)

    def train() -> None:
        for _ in range(3):
            hidden = torch.randn(2, 16)
            for block in blocks:
                hidden = run(block, hidden)
            hidden.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = find_parameters(recorded(tmp_path / "trace.json", train))
    assert found is not None
    assert (found.tensors, found.elements) == (8, elements(blocks))


def test_an_adversarial_pair_has_the_parameters_torch_counts(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    judge = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    maker = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    of_judge, of_maker = (torch.optim.Adam(model.parameters()) for model in (judge, maker))

    def train() -> None:
        of_judge.zero_grad()
        judge(torch.randn(2, 8)).mean().backward()
        made = maker(torch.randn(2, 4))
        (-judge(made.detach()).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(made).mean().backward()
        of_maker.step()

    found = find_parameters(recorded(tmp_path / "trace.json", train))
    assert found is not None
    assert (found.tensors, found.elements) == (8, elements(judge, maker))
