"""What operators really allocate, measured: each kind of call once, alone, on the device.

Libraries choose the workspace of a convolution or the reserve of a norm, so shapes alone do not
tell them. A call that cannot be measured is noted and counts by its shapes. Where a real result has
another size or device than its fake (the seed of attention's dropout stays on the host), calls that
get the fake are measured with the like of the real one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # Runs the call; its results, and the bytes allocated meanwhile at the highest point.
    Meter = Callable[[Callable[[], Any]], tuple[Any, int]]

# Beginnings of the names of operators that may allocate more than their results.
_MEASURED = (
    "aten::_efficient_attention",
    "aten::_embedding_bag",
    "aten::_flash_attention",
    "aten::_scaled_dot_product",
    "aten::_thnn_fused",
    "aten::baddbmm",
    "aten::bmm",
    "aten::convolution",
    "aten::cudnn_",
    "aten::embedding_dense_backward",
    "aten::index_put",
    "aten::native_batch_norm",
    "aten::native_group_norm",
    "aten::native_layer_norm_backward",
    "aten::scatter",
    "aten::sort",
    "aten::topk",
)
# Recurrent layers of libraries: what they keep for backward cannot be run on its own.
_UNKNOWABLE = ("aten::_cudnn_rnn", "aten::miopen_rnn", "aten::mkldnn_rnn")


@dataclass(frozen=True, slots=True)
class RealTensor:
    """What a result was like when the call ran for real."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class OperatorNeeds:
    results: tuple[RealTensor, ...]  # in order
    beside_bytes: int  # that it holds besides, at most, while it runs


@dataclass(slots=True)
class MeasuredNeeds:
    """Runs calls that were made with fake tensors once with real ones."""

    meter: Meter
    most_bytes: int  # of arguments: a larger call is not run
    notes: set[str] = field(default_factory=set)
    _known: dict[str, OperatorNeeds | None] = field(default_factory=dict)
    _unlike: dict[int, RealTensor] = field(default_factory=dict)  # by a fake's living storage

    def of(self, operator: Any, args: Any, kwargs: Any) -> OperatorNeeds | None:
        """None for an operator that allocates its results only; raises for one that has results
        of a size that only its library knows, and cannot be run on its own."""
        if operator.name().startswith(_UNKNOWABLE):
            raise NotImplementedError(f"{operator.name()} does not show what it saves for backward")
        name = operator.name()
        if not name.startswith(_MEASURED) and not _counts_flags(name, args):
            return None
        call = f"{operator.name()} {tree_map(_describe, (args, kwargs))}"
        if call not in self._known:
            self._known[call] = self._measure(operator, args, kwargs)
        return self._known[call]

    def returned(self, fakes: Sequence[torch.Tensor], needs: OperatorNeeds) -> None:
        """A measured call was made with fakes, and these are its results: remember which of them
        are unlike the real ones."""
        for fake, real in zip(fakes, needs.results, strict=True):
            if fake.shape != real.shape or fake.device.type != real.device.type:
                storage = fake.untyped_storage()
                self._unlike[storage._cdata] = real
                weakref.finalize(storage, self._unlike.pop, storage._cdata, None)

    def _measure(self, operator: Any, args: Any, kwargs: Any) -> OperatorNeeds | None:
        if sum(map(_bytes, _tensors((args, kwargs)))) > self.most_bytes:
            self.notes.add(f"workspace of {operator.name()} is unknown: too large to try")
            return None
        try:
            with unset_fake_temporarily(), torch.no_grad():
                given = tree_map(self._zeros_like, (args, kwargs))
                results, highest = self.meter(lambda: operator(*given[0], **given[1]))
                old = {_address(tensor) for tensor in _tensors(given)}
                fresh = {_address(tensor): tensor for tensor in _tensors(results)}
                kept = sum(_bytes(tensor) for at, tensor in fresh.items() if at not in old)
                return OperatorNeeds(
                    tuple(map(_real_tensor, _tensors(results))), max(0, highest - kept)
                )
        except Exception as error:
            self.notes.add(f"workspace of {operator.name()} is unknown: {type(error).__name__}")
            return None

    def _zeros_like(self, value: Any) -> Any:
        """Zeros, so that indices are valid."""
        if not isinstance(value, torch.Tensor):
            return value
        real = self._unlike.get(value.untyped_storage()._cdata) or _real_tensor(value)
        made = torch.empty_strided(real.shape, real.stride, dtype=value.dtype, device=real.device)
        return made.zero_()


@cache
def matmul_workspaces(device: torch.device) -> int:
    """Bytes that the matrix library keeps once it was used forward and backward; none on a CPU.

    Ask before anything else runs on the device: the first use allocates them."""
    if device.type != "cuda":
        return 0
    before = int(torch.cuda.memory_allocated(device))
    layer = torch.nn.Linear(8, 8, device=device)
    layer(torch.ones(8, 8, device=device, requires_grad=True)).sum().backward()
    torch.cuda.synchronize(device)
    del layer
    return int(torch.cuda.memory_allocated(device)) - before


def _counts_flags(name: str, args: Any) -> bool:
    """A sum over a mask copies the mask to int64 first."""
    given = args[0] if args else None
    is_mask = isinstance(given, torch.Tensor) and given.dtype == torch.bool
    return is_mask and name.startswith("aten::sum")


def _describe(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (tuple(value.shape), value.stride(), value.dtype, value.device.type)


def _real_tensor(value: torch.Tensor) -> RealTensor:
    return RealTensor(tuple(value.shape), value.stride(), value.device, _bytes(value))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
