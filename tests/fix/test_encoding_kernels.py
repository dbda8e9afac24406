"""The Triton kernels give the same bits as the CPU versions: on a GPU, or in the interpreter."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.nn import functional

from stepscope.fix.saved.encodings import encode_use, encode_value, pooling_spec
from stepscope.fix.saved.encodings import encoded as chosen
from stepscope.fix.saved.encodings import exact as bits
from stepscope.fix.saved.encodings.encoded import BITS_OF, same_bits
from stepscope.fix.saved.encodings.lossy import (
    SHORT_FLOATS,
    encode_four_bits,
    hashed,
    pack_blocks,
    pack_groups,
)
from stepscope.fix.saved.encodings.outcomes import ReluOutputFromBits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytest.importorskip("triton", reason="there is no Triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter computes with numpy
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="no CUDA device, and TRITON_INTERPRET=1 is not set",
    ),
]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
COUNTS = [1, 7, 1000, 2049]


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Undo it to use the kernels."""
    monkeypatch.setattr(chosen, "_kernels", lambda _: None)
    return monkeypatch


def odd(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(count)
    x = torch.randn(count, dtype=torch.float64)
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, 1e30])
    x[: min(count, 7)] = values[: min(count, 7)].double()
    return x.to(dtype).to(DEVICE)


def assert_same(found: torch.Tensor, right: torch.Tensor) -> None:
    """The interpreter rounds to bfloat16 in its own way."""
    exact = found.dtype != torch.bfloat16 or not INTERPRETED
    rtol, atol = (0.0, 0.0) if exact else (2**-7, 1e-38)
    torch.testing.assert_close(found, right, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("count", COUNTS)
def test_codes(count: int, width: int, plain_torch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 2**width, (count,), dtype=torch.uint8, device=DEVICE)
    right = bits.pack_codes(codes, width)
    plain_torch.undo()
    assert torch.equal(bits.pack_codes(codes, width), right)
    assert torch.equal(bits.unpack_codes(right, count, width), codes)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", COUNTS)
def test_signs_and_relus_backward(count: int, dtype: torch.dtype) -> None:
    from stepscope.fix.saved.encodings import bit_kernels

    x, gradient = odd(count, dtype), odd(count, dtype).flip(0)
    packed = bit_kernels.pack_signs(x)
    assert torch.equal(bits.unpack_bits(packed, count), ~(x <= 0))
    backward = torch.ops.aten.threshold_backward
    right = backward(gradient, x, 0)
    assert same_bits(bit_kernels.relu_backward(gradient, packed), right)
    encoded = encode_use("sign", x)
    assert encoded is not None
    assert same_bits(backward(gradient, encoded.decode(), 0), right)


def test_a_relu_trains_from_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd hands the stand-in to threshold_backward; a second derivative works too."""
    monkeypatch.setattr("stepscope.fix.saved.encodings.outcomes._FUSED_FROM", 1)
    x = odd(96).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    made: list[torch.Tensor] = []

    def unpack(output: torch.Tensor) -> torch.Tensor:
        encoded = encode_use("sign", output)
        assert encoded is not None
        made.append(encoded.decode())
        return made[-1]

    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        output = torch.relu(leaf)
    gradient = torch.randn_like(x).requires_grad_()
    (found,) = torch.autograd.grad(output, leaf, gradient, create_graph=True)
    assert isinstance(made[0], ReluOutputFromBits)
    assert type(found) is torch.Tensor
    assert found.stride() == x.stride()
    plain_leaf = x.clone().requires_grad_()
    (right,) = torch.autograd.grad(torch.relu(plain_leaf), plain_leaf, gradient)
    assert torch.equal(found, right)
    (second,) = torch.autograd.grad(found.sum(), gradient)
    assert torch.equal(second, (~(x <= 0)).float())
    assert torch.equal(made[0] + 1, (~(x <= 0)).float() + 1)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("count", [1, 1000, 4099])
def test_packed_non_zeros(count: int, dtype: torch.dtype) -> None:
    from stepscope.fix.saved.encodings import sparse_kernels

    x = torch.relu(odd(count, dtype))
    patterns = x.view(BITS_OF[x.itemsize])
    parts = sparse_kernels.pack_nonzero(patterns, count)
    mask = patterns != 0
    assert int(parts.total) == int(mask.sum())
    assert torch.equal(bits.unpack_bits(parts.mask, count), mask)
    assert torch.equal(parts.values[: int(parts.total)], patterns[mask])
    assert torch.equal(sparse_kernels.unpack_nonzero(parts, count), patterns)


def test_too_many_non_zeros_are_kept_plain() -> None:
    x = torch.ones(5000, device=DEVICE)

    class Kept:
        def unpack(self) -> torch.Tensor:
            return x

    encoded = encode_value("sparse 0.02", x)
    assert encoded is not None
    assert encoded.check is not None
    encoded.check.keep_until_known(Kept())
    assert torch.equal(encoded.holder(), x)


@pytest.mark.parametrize("name", SHORT_FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 255, 3000])
def test_short_floats(count: int, dtype: torch.dtype, name: str) -> None:
    kind, x = SHORT_FLOATS[name], odd(count, dtype)
    if kind.dtype.itemsize >= x.itemsize:
        return
    from stepscope.fix.saved.encodings import block_kernels

    values, shifts = pack_blocks(x, kind)
    parts = block_kernels.pack_blocks(x, kind)
    assert torch.equal(parts.shifts, shifts)
    right = values.float().flatten()[:count]
    assert torch.equal(parts.values.float().nan_to_num(7e4), right.nan_to_num(7e4))
    encoded = encode_value(name, x)
    assert encoded is not None
    scale = torch.exp2(-shifts.float()).repeat_interleave(256)[:count]
    assert_same(encoded.decode(), (right * scale).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 129, 3000])
def test_four_bits(count: int, dtype: torch.dtype, plain_torch: pytest.MonkeyPatch) -> None:
    x = odd(count, dtype)
    codes, lowest, step = pack_groups(x, hashed(3))
    right, decoded = bits.pack_codes(codes, 4), encode_four_bits(x, 3)
    assert decoded is not None
    right_values = decoded.decode()
    plain_torch.undo()
    from stepscope.fix.saved.encodings import block_kernels

    parts = block_kernels.pack_groups(x, hashed(3))
    assert torch.equal(parts.codes, right)
    assert torch.equal(parts.lowest.nan_to_num(-5), lowest.nan_to_num(-5))
    finite = lowest.isfinite()
    assert torch.equal(parts.step[finite], step[finite])
    found = encode_four_bits(x, 3)
    assert found is not None
    assert_same(found.decode(), right_values)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_windows(layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, 11, 9, device=DEVICE).contiguous(memory_format=layout)
    for kernel, stride, padding in ((2, 2), (3, 2), 1), (3, 2, 1), ((5, 4), 4, 0):
        _, indices = functional.max_pool2d(x, kernel, stride, padding, return_indices=True)
        spec = pooling_spec("max_pool2d_with_indices", (x, kernel, stride, padding))
        assert spec is not None
        encoded = encode_value(spec, indices)
        assert encoded is not None
        assert torch.equal(encoded.decode().as_strided(indices.shape, indices.stride()), indices)
    volume = torch.randn(2, 3, 5, 6, 7, device=DEVICE)
    _, indices = functional.max_pool3d(volume, (2, 3, 2), stride=(1, 2, 2), return_indices=True)
    spec = pooling_spec("max_pool3d_with_indices", (volume, [2, 3, 2], [1, 2, 2]))
    assert spec is not None
    encoded = encode_value(spec, indices)
    assert encoded is not None
    assert torch.equal(encoded.decode().view_as(indices), indices)


@dataclass(frozen=True)
class Normed:
    """A norm's inputs as its kernel takes them, and its result."""

    inputs: tuple[torch.Tensor, ...]
    again: Callable[..., torch.Tensor]
    right: torch.Tensor


def batch_normed(x: torch.Tensor) -> Normed:
    from stepscope.fix.saved.encodings import norm_kernels

    weight, bias = torch.rand(x.shape[1]).to(DEVICE), torch.randn(x.shape[1]).to(DEVICE)
    right, *statistics = torch.native_batch_norm(
        x.float(), weight, bias, None, None, True, 0.1, 1e-5
    )
    again = partial(norm_kernels.normalise_planes, inner=x[0, 0].numel(), share=None)
    if not x.is_contiguous():
        again = partial(norm_kernels.normalise_rows, by_column=True)
    return Normed((x, weight, bias, *statistics), again, right)


def group_normed(x: torch.Tensor) -> Normed:
    from stepscope.fix.saved.encodings import norm_kernels

    weight, bias = torch.rand(x.shape[1]).to(DEVICE), torch.randn(x.shape[1]).to(DEVICE)
    samples, channels, inner = x.shape[0], x.shape[1], x[0, 0].numel()
    right, *statistics = torch.native_group_norm(
        x.float(), weight, bias, samples, channels, inner, channels // 2, 1e-5
    )
    again = partial(norm_kernels.normalise_planes, inner=inner, share=2)
    return Normed((x, weight, bias, *statistics), again, right)


def layer_normed(x: torch.Tensor) -> Normed:
    from stepscope.fix.saved.encodings import norm_kernels

    weight, bias = torch.rand(x.shape[-1]).to(DEVICE), torch.randn(x.shape[-1]).to(DEVICE)
    right, *statistics = torch.native_layer_norm(x.float(), x.shape[-1:], weight, bias, 1e-5)
    again = partial(norm_kernels.normalise_rows, by_column=False)
    return Normed((x, weight, bias, *statistics), again, right)


def drawn(*shape: int, last: bool = False) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(*shape).to(DEVICE)
    return x.to(memory_format=torch.channels_last) if last else x


NORMS = {
    "small planes": lambda: (batch_normed, drawn(3, 6, 5, 7)),
    "planes of one block and more": lambda: (batch_normed, drawn(3, 6, 24, 24)),
    "planes of many blocks": lambda: (batch_normed, drawn(3, 6, 40, 40)),
    "channels last": lambda: (batch_normed, drawn(3, 6, 5, 7, last=True)),
    "groups of small planes": lambda: (group_normed, drawn(3, 8, 5, 7)),
    "groups of large planes": lambda: (group_normed, drawn(3, 8, 40, 40)),
    "rows": lambda: (layer_normed, drawn(3, 7, 48)),
    "rows longer than a block": lambda: (layer_normed, drawn(5, 1500)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("which", NORMS)
def test_a_norm_with_what_follows_is_the_norm_and_then_that(which: str, dtype: torch.dtype) -> None:
    from stepscope.fix.saved.encodings import norm_kernels

    make, drawn_x = NORMS[which]()
    x = drawn_x.to(dtype)
    normed, added = make(x), torch.randn_like(x)
    for form in norm_kernels._FORMS:
        result, fused = (
            normed.again(form, normed.inputs, residual=residual, activation=activation)
            for residual, activation in ((None, None), (added, "relu"))
        )
        limit = 1e-2 if dtype == torch.float16 else 3e-6
        assert torch.allclose(result.float(), normed.right, atol=limit)
        assert_same(fused, torch.relu(result + added))
        assert result.stride() == x.stride()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no functions of the device's library")
@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
@pytest.mark.parametrize("which", NORMS)
def test_an_activation_behind_a_norm(which: str, activation: str) -> None:
    make, x = NORMS[which]()
    normed = make(x)
    result, fused = (
        normed.again("centred", normed.inputs, residual=None, activation=one)
        for one in (None, activation)
    )
    assert torch.equal(fused, getattr(torch, activation)(result))


@pytest.mark.skipif(INTERPRETED, reason="no library's kernels to agree with")
@pytest.mark.parametrize("which", NORMS)
def test_one_order_is_the_librarys(which: str) -> None:
    """The saver finds it by itself; where none is right it repeats the norm, which takes longer."""
    from stepscope.fix.saved.encodings import norm_kernels

    make, x = NORMS[which]()
    normed = make(x)
    again = (
        normed.again(form, normed.inputs, residual=None, activation=None)
        for form in norm_kernels._FORMS
    )
    assert any(torch.equal(one, normed.right) for one in again)
