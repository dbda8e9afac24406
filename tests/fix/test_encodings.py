"""Every encoding gives back what it should, to the last bit: odd values, layouts and types."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from stepscope.fix.saved.encodings import (
    Geometry,
    encode_use,
    encode_value,
    is_outcome,
    outcome_bytes,
    outcome_for,
    pooling_spec,
)
from stepscope.fix.saved.encodings.encoded import BITS_OF, dense, same_bits
from stepscope.fix.saved.encodings.whole_values import (
    narrow_spec,
    pack_codes,
    packed_bytes,
    sparse_spec,
    unpack_codes,
)
from stepscope.fix.saved.step_record import LOSSY, described

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ODD = [
    math.nan,
    math.inf,
    -math.inf,
    -0.0,
    0.0,
    1e-40,
    -1e-40,
    6.0,
    -1.0,
    1.0,
    3.0,
    -3.0,
    0.5,
    -0.5,
]
Layout = Callable[[torch.Tensor], torch.Tensor]
LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "one element": lambda x: x[:1, :1, :1, :1].clone(),
}


def odd_values(dtype: torch.dtype) -> torch.Tensor:
    """With every odd value, in places of vectorised loops and behind them."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    x.view(-1)[: len(ODD)] = torch.tensor(ODD, dtype=torch.float64)
    x.view(-1)[-len(ODD) :] = torch.tensor(ODD, dtype=torch.float64)
    return x.to(dtype)


def assert_comes_back(spec: str, tensor: torch.Tensor, size_bytes: int | None = None) -> None:
    encoded = encode_value(spec, tensor)
    assert encoded is not None
    decoded = Geometry.of(tensor).on(encoded.decode())
    assert decoded.dtype == tensor.dtype
    assert same_bits(decoded.contiguous().flatten(), tensor.contiguous().flatten())
    if size_bytes is not None:
        assert encoded.size_bytes == size_bytes


TO_ENCODE: dict[str, Callable[[], torch.Tensor]] = {
    "bits": lambda: torch.rand(4, 100) > 0.5,
    "two-valued": lambda: 2.0 * (torch.rand(4, 100) > 0.5),
    "sparse": lambda: torch.randn(4, 100).relu(),
    "narrow uint8": lambda: torch.arange(200),
    "window 2,2/2,2/0,0/1,1/16,16": lambda: functional.max_pool2d(
        torch.randn(1, 1, 16, 16), 2, return_indices=True
    )[1],
    **dict.fromkeys(LOSSY, lambda: torch.randn(4, 256)),
    **dict.fromkeys(("sign", "above 0.0", "within -1.0 1.0", "shape"), lambda: torch.randn(4, 100)),
}


@pytest.mark.parametrize("spec", TO_ENCODE)
def test_the_plain_tensor_is_let_go(spec: str) -> None:
    """An encoding beside its tensor saves nothing: what decodes must not hold it."""
    tensor = TO_ENCODE[spec]()
    encoded = encode_use(spec, tensor) if is_outcome(spec) else encode_value(spec, tensor)
    plain = StorageWeakRef(tensor.untyped_storage())
    del tensor
    assert encoded is not None
    assert plain.expired()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 7, 8, 9, 1000])
def test_codes_come_back(width: int, count: int) -> None:
    codes = torch.randint(0, 2**width, (count,), dtype=torch.uint8)
    packed = pack_codes(codes, width)
    assert packed.nbytes == packed_bytes(count, width)
    assert torch.equal(unpack_codes(packed, count, width), codes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_come_back(layout: str) -> None:
    mask = LAYOUTS[layout](torch.rand(2, 3, 5, 7) < 0.5)
    assert_comes_back("bits", mask, packed_bytes(mask.untyped_storage().nbytes()))


@pytest.mark.parametrize("spec", ["bits", "two-valued", "sparse", "narrow uint8", *LOSSY])
def test_what_is_empty_or_of_another_type_is_left_alone(spec: str) -> None:
    assert encode_value(spec, torch.empty(0)) is None
    other = torch.ones(4, dtype=torch.bool if spec in LOSSY else torch.float32)
    if spec in ("bits", "narrow uint8", *LOSSY):
        assert encode_value(spec, other) is None


@pytest.mark.parametrize("dtype", FLOATS)
def test_noise_of_a_dropout_comes_back(dtype: torch.dtype) -> None:
    noise = torch.empty(3, 5, 7, dtype=dtype).bernoulli_(0.7).div_(0.7)
    assert_comes_back("two-valued", noise, 14 + noise.itemsize)
    assert_comes_back("two-valued", torch.zeros(9, dtype=dtype))


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize(
    ("window", "bits"),
    [
        ({"kernel_size": 2}, 2),
        ({"kernel_size": (3, 2), "stride": (2, 1), "padding": 1}, 4),
        ({"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2}, 4),
        ({"kernel_size": 3, "stride": 2, "ceil_mode": True}, 4),
        ({"kernel_size": (5, 4), "stride": 2}, 8),
    ],
)
def test_pooling_indices_come_back(layout: str, window: dict[str, Any], bits: int) -> None:
    x = LAYOUTS[layout](torch.randn(2, 3, 11, 9))
    x[0, 0, :4, :4] = -math.inf
    x[0, 1, 2, 2] = math.nan
    _, indices = functional.max_pool2d(x, **window, return_indices=True)
    names = ("kernel_size", "stride", "padding", "dilation")
    defaults = {"stride": [], "padding": 0, "dilation": 1}
    call = (x, *({**defaults, **window}[name] for name in names))
    spec = pooling_spec("max_pool2d_with_indices", call)
    assert spec is not None
    assert_comes_back(spec, indices, packed_bytes(indices.numel(), bits))


def test_indices_of_volumes_and_adaptive_pools_come_back() -> None:
    x = torch.randn(2, 3, 7, 6, 9)
    _, indices = functional.max_pool3d(x, (2, 3, 2), stride=(1, 2, 2), return_indices=True)
    spec = pooling_spec("max_pool3d_with_indices", (x, [2, 3, 2], [1, 2, 2]))
    assert spec is not None
    assert_comes_back(spec, indices)
    plane = torch.randn(2, 3, 11, 9)
    for size in ([3, 4], [11, 2], [1, 1]):
        _, indices = functional.adaptive_max_pool2d(plane, size, return_indices=True)
        spec = pooling_spec("adaptive_max_pool2d", (plane, size))
        assert spec is not None
        assert_comes_back(spec, indices)


def test_large_windows_and_other_operators_have_no_window() -> None:
    x = torch.randn(1, 1, 40, 40)
    assert pooling_spec("max_pool2d_with_indices", (x, [17, 17])) is None
    assert pooling_spec("relu", (x,)) is None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_values_come_back(layout: str, dtype: torch.dtype) -> None:
    x = torch.relu(odd_values(dtype))
    x.view(-1)[20] = -0.0
    x = LAYOUTS[layout](x)
    if layout != "one element":
        spec = sparse_spec(x)
        assert spec is not None
        count = int(torch.count_nonzero(x.as_strided((x.numel(),), (1,)).view(BITS_OF[x.itemsize])))
        stored = packed_bytes(x.untyped_storage().nbytes() // x.itemsize) + count * x.itemsize
        assert_comes_back(spec, x, stored)


def test_what_does_not_compress_is_left_alone() -> None:
    x = torch.randn(1000)
    assert sparse_spec(x) is None
    assert encode_value("sparse", x) is None


def test_negative_zero_is_not_zero() -> None:
    x = torch.zeros(1000)
    x[5] = -0.0
    assert sparse_spec(x) == "sparse"
    assert_comes_back("sparse", x)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "expected"),
    [
        (0, 255, torch.int64, "narrow uint8"),
        (-128, 127, torch.int64, "narrow int8"),
        (-1, 255, torch.int64, "narrow int16"),
        (0, 2**31 - 1, torch.int64, "narrow int32"),
        (0, 2**31, torch.int64, None),
        (0, 2**15, torch.int32, None),
        (0, 255, torch.int16, "narrow uint8"),
    ],
)
def test_integers_in_the_shortest_type(
    low: int, high: int, dtype: torch.dtype, expected: str | None
) -> None:
    x = torch.tensor([low, 1, high], dtype=dtype)
    assert narrow_spec(x) == expected
    if expected is not None:
        assert_comes_back(expected, x)


def test_integers_that_outgrow_their_type_are_kept() -> None:
    assert encode_value("narrow uint8", torch.tensor([0, 256])) is None


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "threshold": lambda x: functional.threshold(x, 0.5, 0.0),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
    "leaky_relu_": lambda x: functional.leaky_relu_(x * 1, 0.1),
    "hardtanh": functional.hardtanh,
    "relu6": functional.relu6,
    "hardsigmoid": functional.hardsigmoid,
    "clamp": lambda x: x.clamp(-0.5, 3),
    "clamp_min": lambda x: x.clamp(min=-0.5),
    "clamp_max": lambda x: torch.clamp_max(x, 3.0),
}


def with_use_encoded(
    activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, str | None]:
    """The gradient when the activation's node gets what `encode_use` decodes."""
    kept: list[torch.Tensor] = []
    specs: list[str | None] = [None]

    def unpack(place: int) -> torch.Tensor:
        spec = specs[0]
        encoded = None if spec is None else encode_use(spec, kept[place])
        if encoded is None:
            return kept[place]
        assert spec is not None
        assert encoded.size_bytes == outcome_bytes(spec, kept[place].numel())
        return encoded.decode()

    def pack(tensor: torch.Tensor) -> int:
        kept.append(tensor.detach())
        return len(kept) - 1

    leaf = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = activation(leaf)
    specs[0] = outcome_for(output.grad_fn, x.dtype)
    (found,) = torch.autograd.grad(output, leaf, gradient)
    return found, specs[0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_side_is_all_that_backward_asks_for(name: str, layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](odd_values(dtype))
    gradient = torch.randn_like(x)
    gradient.as_strided((1,), (1,)).fill_(math.nan)
    leaf = x.detach().requires_grad_()
    (plain,) = torch.autograd.grad(ACTIVATIONS[name](leaf), leaf, gradient)
    found, spec = with_use_encoded(ACTIVATIONS[name], x, gradient)
    assert spec is not None
    assert found.stride() == plain.stride()
    same = (found == plain) | (found.isnan() & plain.isnan())
    assert bool(same.all())


def test_a_limit_that_is_not_exact_in_a_short_type_is_left_alone() -> None:
    x = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    assert outcome_for(x.clamp(min=0.1).grad_fn, torch.bfloat16) is None
    assert outcome_for(x.clamp(min=0.5).grad_fn, torch.bfloat16) == "least 0.5"
    assert outcome_for(x.float().clamp(min=0.1).grad_fn, torch.float32) == "least 0.1"


def test_limits_that_leave_no_side_are_left_alone() -> None:
    x = torch.randn(4, requires_grad=True)
    assert outcome_for(x.clamp(min=-math.inf).grad_fn, torch.float32) is None


def test_a_tensor_with_gaps_has_no_outcome() -> None:
    assert encode_use("sign", torch.randn(4, 4)[:, ::2]) is None
    assert dense(torch.randn(4, 1).expand(4, 4)) is None


@pytest.mark.parametrize("dtype", FLOATS)
def test_pooling_reads_only_the_shape(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)
    encoded = encode_use("shape", x)
    assert encoded is not None
    assert encoded.size_bytes == 0
    assert (encoded.decode().shape, encoded.decode().stride()) == (x.shape, x.stride())


@pytest.mark.parametrize(
    ("spec", "smaller", "error"),
    [
        ("bf16", 2, 2**-8),
        ("fp16", 2, 2**-11),
        ("fp8-e4m3", 4, 2**-4),
        ("fp8-e5m2", 4, 2**-3),
        ("4-bit", 7, 1 / 15),
    ],
)
def test_lossy_encodings_lose_as_much_as_they_say(spec: str, smaller: int, error: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 129) * torch.logspace(-12, 12, 64)[:, None]
    encoded = encode_value(spec, x)
    assert encoded is not None
    assert encoded.size_bytes <= x.nbytes / smaller * 1.01
    decoded = Geometry.of(x).on(encoded.decode())
    group = torch.nn.functional.pad(x.flatten().abs(), (0, -x.numel() % 256)).view(-1, 256)
    largest = group.amax(1, keepdim=True).expand_as(group).flatten()[: x.numel()].view_as(x)
    allowed = error * (x.abs() if spec != "4-bit" else 2 * largest) + largest * 2**-20
    assert bool(((decoded - x).abs() <= allowed).all())
    assert described(spec) == f"{spec} (lossy)"


@pytest.mark.parametrize("spec", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(spec: str, bad: float) -> None:
    x = torch.randn(700)
    x[[3, 699]] = bad
    encoded = encode_value(spec, x)
    assert encoded is not None
    decoded = encoded.decode()
    assert not decoded[[3, 699]].isfinite().any()
    assert decoded[256:500].isfinite().all()


@pytest.mark.parametrize("spec", ["fp16", "fp8-e4m3", "fp8-e5m2", "4-bit", "bf16"])
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-30, 1e38])
def test_very_small_and_very_large_blocks(spec: str, scale: float) -> None:
    x = torch.linspace(-1, 1, 513) * scale
    encoded = encode_value(spec, x)
    assert encoded is not None
    error = (encoded.decode() - x).abs().max()
    assert float(error) <= 0.13 * scale + 2.0**-118


def test_short_types_are_not_made_longer() -> None:
    half = torch.randn(300, dtype=torch.bfloat16)
    assert encode_value("bf16", half) is None
    assert encode_value("fp16", half) is None
    assert encode_value("fp8-e4m3", half) is not None
    assert all(encode_value(spec, torch.randn(300, dtype=torch.float64)) is None for spec in LOSSY)


def test_stochastic_rounding_is_right_on_average_and_leaves_torchs_numbers_alone() -> None:
    x = torch.linspace(0, 1, 128)
    state = torch.get_rng_state()
    decoded = torch.stack([encode_value("4-bit", x).decode() for _ in range(400)])  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), state)
    assert float((decoded.mean(0) - x).abs().max()) < 0.02
    assert not torch.equal(decoded[0], decoded[1])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*ODD, 0.0, 0.0, 0.0, 2.5]), min_size=1, max_size=200),
    st.sampled_from(FLOATS),
)
def test_any_sparse_value_comes_back(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    spec = sparse_spec(x)
    if spec is not None:
        assert_comes_back(spec, x)
