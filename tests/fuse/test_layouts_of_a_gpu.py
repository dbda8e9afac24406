"""The layouts and kernels that arrays use on a GPU, on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import step, step_alone

from stepscope.fix.fuse import ModelArray, Stacked, fuse, kernel_choice
from stepscope.fix.fuse import kernel_choice as choosing
from stepscope.fix.fuse.kernel_choice import Chooser, WayToChoose
from stepscope.fix.fuse.rules import convolutions
from stepscope.fix.fuse.rules.convolution_products import KernelWindow, PatchShape
from stepscope.fix.fuse.rules.convolutions import _Convolution
from stepscope.fix.fuse.updates import step_each

COUNT = 3


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions end with channels last, as half precision does on CUDA."""
    monkeypatch.setattr(convolutions, "_is_half_on_cuda", lambda *_: True)


class Residual(nn.Module):
    """The parts of a ResNet: a stem, a block in strides with a shortcut, deep layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.path = nn.Sequential(
            nn.Conv2d(8, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
            nn.Conv2d(12, 12, 3, 1, 1), nn.BatchNorm2d(12),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(8, 12, 1, 2, bias=False), nn.BatchNorm2d(12))
        self.deep = nn.Conv2d(12, 10, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.relu(self.path(x) + self.short(x))
        return self.deep(x).mean((2, 3))


def residuals() -> tuple[list[Any], list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    models = [Residual().double() for _ in range(COUNT)]
    rates = (1e-3 * (1 + place) for place in range(COUNT))
    own = [
        torch.optim.Adam(one.parameters(), lr=rate) for one, rate in zip(models, rates, strict=True)
    ]
    return models, own


def array_of_residuals(**settings: Any) -> ModelArray:
    return fuse(*residuals(), draws="together", **settings)


def losses_of(array: ModelArray, compute: Callable[[Any], Any]) -> torch.Tensor:
    torch.manual_seed(1)
    batches = (Stacked(torch.randn(COUNT, 4, 3, 16, 16).double(), COUNT) for _ in range(3))
    return torch.stack([step(array, compute(batch)) for batch in batches])


def prefer(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def pick(self: Chooser, operator: WayToChoose) -> str:
        return way if way in operator.ways() else operator.usual

    monkeypatch.setattr(Chooser, "pick", pick)


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """Losses [steps, models] of the models trained one at a time."""
    models, own = residuals()
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        pictures = torch.randn(COUNT, 4, 3, 16, 16).double()
        losses.append(
            torch.stack(
                [
                    step_alone(optimizer, model(x).square().mean())
                    for model, optimizer, x in zip(models, own, pictures, strict=True)
                ]
            )
        )
    return torch.stack(losses)


@pytest.mark.parametrize("way", ["the usual", "unfolded", "unfolded, rows kept"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_way_trains_as_alone_in_the_layouts_of_a_gpu(
    way: str, compiled: bool, alone: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, way)
    array = array_of_residuals()

    def loss(x: Any) -> Any:
        return array(x).square().mean()

    compute = array.compile(loss, backend="aot_eager") if compiled else loss
    torch.testing.assert_close(losses_of(array, compute), alone, rtol=1e-10, atol=1e-10)
    assert "one by one" not in array.report()["functions"]


def test_a_stem_leaves_channels_last_to_norms_and_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, "unfolded")
    array = array_of_residuals()
    seen = array.apply_each(
        lambda x: array._template[0].stem(x),
        Stacked(torch.randn(COUNT, 4, 3, 16, 16).double(), COUNT),
    )
    assert seen.order == "channel"
    assert seen.physical.is_contiguous(memory_format=torch.channels_last)


def test_ways_are_measured_to_the_layout_that_the_next_operator_takes() -> None:
    func: Any = torch.nn.functional.conv2d
    call = _Convolution(func, COUNT, False, "front", 2, 3, 1, 1)
    tensors = [torch.randn(COUNT, 4, 3, 16, 16), torch.randn(COUNT, 8, 3, 7, 7)]
    ways = call.operator(tensors).ways()
    assert {"grouped", "grouped, channels last", "unfolded", "one by one"} <= ways.keys()
    for name, way in ways.items():
        assert way(*tensors).is_contiguous(memory_format=torch.channels_last), name


def test_a_compiler_finds_choices_that_were_measured_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(choosing, "_LEAST_WORK", 0)
    measured: list[tuple[Any, ...]] = []

    def fastest(operator: WayToChoose, _: bool) -> str:
        x, weight = operator.tensors[:2]
        result = operator.ways()["unfolded" if "unfolded" in operator.ways() else "product"](
            *operator.tensors
        )
        assert type(result) is torch.Tensor
        torch.autograd.grad(result.sum(), weight)  # real values, with gradients
        measured.append((tuple(x.shape), x.stride(), x.requires_grad, weight.requires_grad))
        return operator.usual

    monkeypatch.setattr(choosing, "fastest", fastest)
    array = array_of_residuals(choose="measure")
    compute = array.compile(lambda x: array(x).square().mean(), backend="aot_eager")
    first = losses_of(array, compute)
    assert len(measured) == len(array.report()["choices"]) == 5
    assert measured[0] == ((COUNT, 4, 3, 16, 16), (3072, 768, 256, 16, 1), False, True)
    assert all(one[2:] == (True, True) for one in measured[1:])
    again = array_of_residuals(choose="measure")
    torch.testing.assert_close(losses_of(again, lambda x: again(x).square().mean()), first)


class OnCuda:
    """Stands for a tensor of a GPU."""

    device, shape, dtype, requires_grad = torch.device("cuda"), (2,), torch.float32, True

    def stride(self) -> tuple[int, ...]:
        return (1,)


def test_launches_do_not_count_in_a_step_that_is_captured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(choosing, "is_ordinary", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(choosing, "_seconds", lambda way, _: {"few": 1.0, "many": 2.0}[way])
    monkeypatch.setattr(choosing, "_device_seconds", lambda way, _: {"few": 1.0, "many": 0.5}[way])
    tensors: Any = [OnCuda()]
    ways: Any = {"few": "few", "many": "many"}
    operator = WayToChoose("thing", tensors, (), "few", lambda: ways, lambda: 1)
    chooser = Chooser("measure")
    assert chooser.pick(operator) == "few"
    chooser.launches_count = False
    assert chooser.pick(operator) == "many"
    chooser.launches_count = True
    assert chooser.pick(operator) == "few"
    array = array_of_residuals()
    array.graph(lambda: None)
    assert not array.chooser.launches_count


# Rows of patches.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 8, 12])
def test_rows_hold_what_every_output_sees_and_end_aligned(
    channels: int, dtype: torch.dtype
) -> None:
    window = KernelWindow((3, 2), (2, 1), (1, 0), (1, 2))
    pictures = torch.randn(2, channels, 6, 5).to(dtype)
    last = torch.stack([pictures, -pictures], -1).movedim(1, -1)  # two models
    rows, shape = window.rows(last), window.shape_of(last)
    assert rows.is_contiguous()
    assert rows.stride(1) * rows.element_size() % 16 == 0
    assert shape.padded_channels <= channels * 4 / 3
    seen = torch.nn.functional.unfold(
        pictures.double(), window.kernel, window.dilation, window.padding, window.stride
    )
    wanted = seen.unflatten(1, (channels, 6)).permute(0, 3, 2, 1)
    own = shape.filters(rows[:, 0].double()[None])[0].flatten(1, 2)
    torch.testing.assert_close(own, wanted.reshape(-1, 6, channels), rtol=0, atol=0)
    assert torch.equal(rows[:, 1], -rows[:, 0])
    assert float(rows[..., shape.used_columns :].abs().sum()) == 0


@pytest.mark.parametrize(("outputs", "channels"), [(8, 8), (8, 3), (5, 6), (4, 1)])
def test_filters_are_turned_for_gradients_of_the_input(outputs: int, channels: int) -> None:
    weight = torch.randn(2, outputs, 3, 2, channels)
    shape = PatchShape.of((3, 2), outputs, 4)
    made = shape.turned_matrices(weight)
    assert made.shape == (2, shape.columns, channels)
    wanted = shape.matrices(weight.flip(2, 3).transpose(1, -1)).transpose(1, 2)
    assert torch.equal(made, wanted)


def test_rows_are_copied_by_16_bytes_where_channels_allow_it() -> None:
    assert PatchShape.of((7, 7), 3, 2) == ((7, 7), 3, 4, 4, 200)
    assert PatchShape.of((3, 3), 128, 2) == ((3, 3), 128, 8, 128, 1152)
    assert PatchShape.of((3, 3), 64, 4) == ((3, 3), 64, 4, 64, 576)
    assert PatchShape.of((3, 3), 1, 2) == ((3, 3), 1, 1, 1, 16)


# Kernels.


class FakeKernels:
    """Stands for a module of kernels."""

    def __init__(self, agrees: bool | Exception) -> None:
        self._agrees, self.asked = agrees, 0

    def agrees(self, _: torch.device) -> bool:
        self.asked += 1
        if isinstance(self._agrees, Exception):
            raise self._agrees
        return self._agrees


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernel_choice, "_known", {})


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("answer", [True, False, RuntimeError("no compiler")])
def test_kernels_are_used_where_they_agree_with_torch(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = FakeKernels(answer)
    monkeypatch.setattr(kernel_choice, "import_module", lambda *_: kernels)
    given = torch.ones(2)
    for _ in range(2):
        found = kernel_choice.proven_kernels("some_kernel", given)
        assert found is (kernels if answer is True else None)
    assert kernels.asked == 1


def test_kernels_are_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(kernel_choice, "import_module", pytest.fail)
    assert kernel_choice.proven_kernels("adam_kernel", torch.ones(2)) is None


def test_models_that_differ_step_by_a_kernel_of_their_own_where_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each model's weights get a call of torch's kernel."""
    from stepscope.fix.fuse import optimizer as stepping

    class Kernels:
        can, calls = True, 0

        def can_step(self, *_: Any) -> bool:
            return self.can

        def step_all(self, *_: Any) -> None:
            self.calls += 1

    kernels, each = Kernels(), []
    monkeypatch.setattr(stepping, "proven_kernels", lambda *_: kernels)
    monkeypatch.setattr(stepping, "step_each", lambda *given: (each.append(1), step_each(*given)))
    array = array_of_residuals()
    assert array.optimizer is not None
    array.optimizer.use_kernels = True
    losses_of(array, lambda x: array(x).square().mean())
    assert (kernels.calls, len(each)) == (3, 0)
    kernels.can = False
    losses_of(array, lambda x: array(x).square().mean())
    assert (kernels.calls, len(each)) == (3, 3)
