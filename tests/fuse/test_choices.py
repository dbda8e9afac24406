"""Convolutions in every way that can compute them, and the choice between the ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from twins import assert_same, train_both

from stepscope.errors import UsageError
from stepscope.fix.choice_cache import ChoiceCache
from stepscope.fix.fuse import Stacked, fuse
from stepscope.fix.fuse import kernel_choice as choosing
from stepscope.fix.fuse.kernel_choice import Chooser, WayToChoose, fastest
from stepscope.fix.fuse.rules.convolution_products import useful_taps
from stepscope.fix.fuse.rules.convolutions import _Convolution

COUNT = 3
SHAPES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "conv1d of one": (functional.conv1d, (2, 4, 5), (6, 4, 1), {}),
    "conv2d of one": (functional.conv2d, (2, 4, 5, 6), (6, 4, 1, 1), {}),
    "conv2d of one, in strides": (functional.conv2d, (2, 4, 5, 6), (6, 4, 1, 1), {"stride": 2}),
    "conv2d of one, two strides": (
        functional.conv2d,
        (2, 4, 5, 6),
        (6, 4, 1, 1),
        {"stride": (2, 1)},
    ),
    "conv3d of one": (functional.conv3d, (2, 4, 3, 3, 3), (6, 4, 1, 1, 1), {}),
    "conv2d": (functional.conv2d, (2, 4, 5, 6), (6, 4, 3, 3), {"padding": 1}),
    "conv2d, in strides with gaps": (
        functional.conv2d,
        (2, 4, 9, 6),
        (6, 4, 3, 2),
        {"stride": (2, 3), "padding": (2, 1), "dilation": (2, 1)},
    ),
    "conv2d with a wide border": (functional.conv2d, (2, 4, 2, 1), (6, 4, 3, 3), {"padding": 3}),
    "conv1d": (functional.conv1d, (2, 4, 7), (6, 4, 3), {"stride": 2, "padding": 1}),
    "conv3d": (functional.conv3d, (2, 4, 3, 4, 3), (6, 4, 2, 3, 1), {"padding": (0, 1, 0)}),
    "conv2d in groups": (functional.conv2d, (2, 4, 5, 6), (6, 2, 3, 3), {"groups": 2}),
}
LAYOUTS = ("front", "channel", "shared")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_ways_of_a_convolution_agree_forward_and_backward(
    shape: str, biased: bool, layout: str
) -> None:
    func, size, kernel, settings = SHAPES[shape]
    torch.manual_seed(1)
    learned_input = torch.randn(COUNT, *size, dtype=torch.float64, requires_grad=True)
    given = learned_input
    if layout == "shared":
        given = given[:1].expand(COUNT, *size)
    weight = torch.randn(COUNT, *kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(COUNT, kernel[0], dtype=torch.float64, requires_grad=True)
    wanted = torch.stack(
        [
            func(given[at], weight[at], bias[at] if biased else None, **settings)
            for at in range(COUNT)
        ]
    )
    upstream = torch.randn_like(wanted)
    learned = [learned_input, weight, *([bias] if biased else [])]
    gradients = torch.autograd.grad(wanted, learned, upstream, retain_graph=True)

    stacked = Stacked(given, COUNT)
    pictures = {"front": given, "channel": stacked.channels(), "shared": given[0]}[layout]
    known = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **settings}
    order: Any = "channel" if layout == "channel" else "front"
    call = _Convolution(func, COUNT, layout == "shared", order, **known)
    tensors = [pictures, weight.detach().requires_grad_()]
    tensors += [bias.detach().requires_grad_()] if biased else []
    names = list(call.operator(tensors).ways())
    assert "grouped" in names
    assert ("product" in names) == ("of one" in shape)
    for name in names:
        made = call.ways()[name](*tensors)
        torch.testing.assert_close(made.front(), wanted, msg=name)
        own = torch.autograd.grad(
            made.front(), [learned_input, *tensors[1:]], upstream, retain_graph=True
        )
        for ours, theirs in zip(own, gradients, strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)


DEEP: dict[str, tuple[int, int, int, int, int, tuple[int, int] | None]] = {
    # size, kernel, stride, padding, dilation, and the kernel elements that count
    "one element in a border": (1, 3, 1, 1, 1, (1, 2)),
    "two elements, in strides": (2, 3, 2, 1, 1, (1, 3)),
    "two elements": (2, 3, 1, 1, 1, None),
    "wide gaps": (2, 3, 1, 2, 2, (1, 2)),
    "the end of a wide kernel": (2, 4, 3, 2, 1, (2, 4)),
    "no border": (3, 3, 1, 0, 1, None),
}


@pytest.mark.parametrize("case", DEEP)
def test_kernel_elements_that_see_only_the_border_are_left_out(case: str) -> None:
    size, kernel, stride, padding, dilation, expected = DEEP[case]
    taps = useful_taps((size,), (kernel,), stride, padding, dilation)
    assert (None if taps is None else (taps.first[0], taps.end[0])) == expected
    x, weight = torch.randn(2, 3, size).double(), torch.randn(1, 4, 3, kernel).double()
    whole = functional.conv1d(x, weight[0], None, stride, padding, dilation)
    seen = [
        place
        for place in range(kernel)
        if not torch.equal(
            whole,
            functional.conv1d(
                x, weight[0].index_fill(2, torch.tensor(place), 0), None, stride, padding, dilation
            ),
        )
    ]
    if taps is not None:
        assert seen == list(range(*(expected or (0, kernel))))
        part = taps.of(weight)[0]
        made = functional.conv1d(x, part, None, stride, taps.padding, dilation)
        torch.testing.assert_close(made, whole)


def test_a_deep_layer_over_one_element_trains_as_it_would_alone() -> None:
    assert_same(
        train_both(lambda: nn.Conv2d(3, 5, 3, padding=1), lambda: (torch.randn(4, 3, 1, 1),))
    )


def of_size(ways: dict[str, Any], usual: str = "slow") -> WayToChoose:
    x = torch.ones(3, requires_grad=True)
    return WayToChoose("thing", [x], (1,), usual, lambda: ways, lambda: 1 << 30)


def test_the_fastest_way_is_taken_and_one_that_fails_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took = {"fast": 0.1, "slow": 0.2}

    def seconds(way: Any, tensors: Any) -> float:
        if way == "broken":
            raise RuntimeError("not here")
        return took[way]

    monkeypatch.setattr(choosing, "_seconds", seconds)
    assert fastest(of_size({"slow": "slow", "broken": "broken", "fast": "fast"})) == "fast"
    assert fastest(of_size({"broken": "broken"})) == "slow"


def test_a_choice_is_measured_once_and_kept_for_the_next_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path))
    measured = []

    def seconds(way: Any, tensors: Any) -> float:
        measured.append(way)
        return {"slow": 2.0, "fast": 1.0}[way]

    monkeypatch.setattr(choosing, "_seconds", seconds)
    operator = of_size({"slow": "slow", "fast": "fast"})
    first = Chooser("measure")
    assert [first.pick(operator) for _ in range(3)] == ["fast"] * 3
    assert measured == ["slow", "fast"]
    assert list(first.choices().values()) == ["fast"]
    assert Chooser("measure").pick(operator) == "fast"
    assert measured == ["slow", "fast"]
    assert Chooser("rules").pick(operator) == "slow"
    (file,) = tmp_path.iterdir()
    file.write_text("{damaged")
    assert Chooser("measure").pick(operator) == "fast"
    assert measured == ["slow", "fast"] * 2
    assert "fast" in file.read_text()


def test_small_work_on_a_cpu_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_seconds", pytest.fail)
    operator = of_size({"slow": "slow", "fast": "fast"})._replace(work=lambda: 10)
    assert Chooser("measure").pick(operator) == "slow"


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 9}', '{"schema": 1, "choices": [1]}'])
def test_a_damaged_cache_counts_as_none(content: str, tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    file.write_text(content)
    cache = ChoiceCache(file)
    assert cache.get("key") is None
    cache.put("key", "way")
    assert ChoiceCache(file).get("key") == "way"


def test_an_array_measures_for_real_and_reports_its_choices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(choosing, "_LEAST_WORK", 0)
    models = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)) for _ in range(2)]
    array = fuse(models, choose="measure")
    x = torch.randn(2, 3, 6, 6)
    made = array([x, x])
    for place, model in enumerate(models):
        torch.testing.assert_close(made.of(place), model(x))
    choices = array.report()["choices"]
    assert len(choices) == 2
    assert all(key.startswith("conv2d") for key in choices)


def test_an_unknown_way_to_choose_is_refused() -> None:
    with pytest.raises(UsageError, match="choose is"):
        fuse([nn.Linear(2, 2)], choose="guess")  # type: ignore[arg-type]


def test_a_chain_of_products_and_norms_moves_nothing() -> None:
    """What a product leaves behind is what the norm and the next product take."""
    models = [
        nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 5, 1))
        for _ in range(2)
    ]
    array = fuse(models)
    made = array(torch.randn(6, 3, 7))
    assert made.front().transpose(1, 2).is_contiguous()
    seen = array.apply_each(lambda x: array._template[0][:3](x), torch.randn(6, 3, 7))  # type: ignore[index]
    assert seen.front().transpose(1, 2).is_contiguous()


def test_a_product_with_channels_last_follows_autocast() -> None:
    call = _Convolution(functional.conv2d, COUNT, False, "channel", 1, 0, 1, 1)
    pictures = torch.randn(2, COUNT * 4, 5, 5).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(COUNT, 6, 4, 1, 1, requires_grad=True), torch.randn(COUNT, 6)
    with torch.autocast("cpu", torch.bfloat16):
        made = call.ways()["product, channels last"](pictures, weight, bias)
    assert made.dtype == torch.bfloat16
    assert made.physical.is_contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(made.physical.float().sum(), weight)
    assert gradient.dtype == torch.float32
    wanted = call.ways()["grouped"](pictures, weight, bias)
    torch.testing.assert_close(made.front().float(), wanted.front(), rtol=3e-2, atol=3e-2)
