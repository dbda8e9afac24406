"""A tensor that stands for one tensor of each model in an array.

A model's own code computes with it as with its own tensor: `shape` is that of one model. Behind it
one tensor holds all models, in one of two layouts:

front    [models, *shape]
channel  [batch, models * channels, *rest]: what grouped convolutions and their neighbours take

Each torch function is computed for all models by a rule (rules/); where there is none by vmap, and
where vmap fails model by model. What all models have in common, such as a batch that they share, is
computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch

from stepscope.errors import StepscopeError, UsageError
from stepscope.fix.fuse.ledger import note
from stepscope.fix.memory_meters import is_out_of_memory

Layout = Literal["front", "channel"]
_TELLS = {
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_quantized",
    "is_nested", "is_mkldnn", "is_meta", "names", "is_mps", "is_xpu", "is_cpu",
}  # fmt: skip
_ANSWERS = {
    "size", "dim", "ndimension", "numel", "is_floating_point", "is_complex", "get_device",
    "__len__", "element_size", "nelement", "is_same_size", "is_signed",
}  # fmt: skip
_ONE_VALUE = {
    "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__",
    "__contains__", "__iter__", "nonzero", "unique", "masked_select", "equal", "allclose",
}  # fmt: skip

# What acts on the tensor itself, or on its history, and not on its values.
_ITSELF = {
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_",
    "detach_", "set_", "resize_", "resize_as_", "share_memory_", "as_subclass", "__set__",
    "__delete__", "swap_tensors", "module_load", "refine_names", "rename_",
}  # fmt: skip
_ONE_NUMBER = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__"}


class NotFusableError(StepscopeError):
    """This cannot be computed for all models at once; each can still compute it alone."""


class Stacked(torch.Tensor):
    """One tensor of each of `count` models."""

    compute: ClassVar[Callable[..., Any]]  # rules/ puts its own here
    physical: torch.Tensor
    order: Layout
    count: int
    common: torch.Tensor | None  # the one tensor that all models have, where they share it
    view_again: Callable[[], Stacked] | None  # this view, of what it was taken from as it is now
    _sizes: torch.Size
    _is_param: bool  # isinstance(..., torch.nn.Parameter) asks for it

    @staticmethod
    def __new__(cls, physical: torch.Tensor, count: int, order: Layout = "front") -> Stacked:
        if order == "front":
            shape = physical.shape[1:]
        else:
            batch, channels, *rest = physical.shape
            shape = torch.Size((batch, channels // count, *rest))
        stacked: Stacked = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=physical.dtype, device=physical.device
        )
        stacked._sizes = shape
        return stacked

    def __init__(self, physical: torch.Tensor, count: int, order: Layout = "front") -> None:
        self.physical, self.count, self.order = physical, count, order
        self.common = self.view_again = None

    @classmethod
    def share(cls, tensor: torch.Tensor, count: int) -> Stacked:
        """The same tensor for every model; nothing is copied."""
        stacked = cls(tensor.unsqueeze(0).expand(count, *tensor.shape), count)
        stacked.common = tensor
        return stacked

    def __repr__(self, **_: Any) -> str:
        return f"Stacked({self.count} models, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, form: str) -> str:
        """One number for each model, where each has one."""
        if not form or self.numel() != 1:
            return repr(self)
        return "[" + ", ".join(format(one.item(), form) for one in self.each()) + "]"

    # What rules and models ask for most is answered here: torch would go through
    # __torch_function__ for each.

    @property
    def shape(self) -> torch.Size:
        return self._sizes

    @property
    def ndim(self) -> int:
        return len(self._sizes)

    @property
    def dtype(self) -> torch.dtype:
        return self.physical.dtype

    @property
    def device(self) -> torch.device:
        return self.physical.device

    def dim(self) -> int:
        return len(self._sizes)

    def size(self, dim: int | None = None) -> Any:
        return self._sizes if dim is None else self._sizes[dim]

    def front(self) -> torch.Tensor:
        """[models, *shape]."""
        if self.order == "front":
            return self.physical
        batch, channels, *rest = self.physical.shape
        apart = self.physical.reshape(batch, self.count, channels // self.count, *rest)
        return apart.transpose(0, 1)

    def channels(self) -> torch.Tensor:
        """[batch, models * channels, *rest]."""
        if self.order == "channel":
            return self.physical
        if self.physical.dim() < 3:
            raise NotFusableError("a tensor of one dimension has no channels")
        batch = self.physical.shape[1]
        return self.physical.transpose(0, 1).reshape(batch, -1, *self.physical.shape[3:])

    def separate(self) -> None:
        """Give each model a tensor of its own, where all share one; views stay views."""
        if self.common is None:
            return
        if self.view_again is None:
            self.physical, self.common = self.physical.clone(), None
        else:
            own = self.view_again()
            self.physical, self.order, self.common = own.physical, own.order, None

    def of(self, model: int) -> torch.Tensor:
        """One model's tensor."""
        return self.front()[model]

    def each(self) -> tuple[torch.Tensor, ...]:
        """Every model's tensor, in order."""
        parts: tuple[torch.Tensor, ...] = self.front().unbind(0)
        return parts

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return _read_property(func, args)
        if name in _ANSWERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _ONE_VALUE and not all_common(args, kwargs):
            return _agreed(func, name, args, kwargs)
        if name in _ITSELF or func is torch.autograd.grad:
            raise NotFusableError(f"{name} needs a single model's tensor: result.of(i) is one")
        if not all(map(_is_known_kind, types)):
            raise NotFusableError("tensors of another class, with code of its own, take part")
        if name == "backward":
            return _backward(*args, **kwargs)
        return cls.compute(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # what reaches it has no Python function that a rule could replace
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotFusableError(f"{func} was called below torch's functions")


def _is_known_kind(kind: type) -> bool:
    """Whether tensors of this class are plain, an array's, or a compiler's."""
    plain = kind is torch.Tensor or kind is torch.nn.Parameter or issubclass(kind, Stacked)
    return plain or str(kind.__module__).startswith("torch._subclasses.")


def _backward(
    loss: Stacked, gradient: Any = None, *settings: Any, inputs: Any = None, **named: Any
) -> None:
    """From every model's loss; `gradient` is 1 for each."""
    if inputs is not None:
        raise UsageError(
            "backward(inputs=...) is not supported for fused models. Use array.backward(loss)"
        )
    front = loss.front()
    first = gradient.front() if isinstance(gradient, Stacked) else gradient
    if first is None:
        first = torch.ones_like(front)
    front.backward(first.expand_as(front), *settings, **named)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether it holds values, as no tensor does that a compiler records operations with."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def is_capturing() -> bool:
    """Whether a CUDA graph records what is computed now."""
    return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


def is_final(error: Exception) -> bool:
    """Whether another way of computing would not help: memory is short, the user is told what to
    change, or a checkpointed module was computed as far as backward needs."""
    if isinstance(error, NotFusableError):
        return False
    if isinstance(error, StepscopeError) or is_out_of_memory(error):
        return True
    return type(error).__name__ == "_StopRecomputationError"


def stack_in_place(windows: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor over windows that lie side by side in one memory; others are copied."""
    first = windows[0]
    begins = [window.storage_offset() for window in windows]
    apart = begins[1] - begins[0] if len(windows) > 1 else first.numel()
    together = all(
        window.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and window.stride() == first.stride()
        and begin == begins[0] + place * apart
        for place, (window, begin) in enumerate(zip(windows, begins, strict=True))
    )
    if not together or (apart < first.numel() and len(windows) > 1):
        return torch.stack(list(windows))
    return first.as_strided((len(windows), *first.shape), (apart, *first.stride()), begins[0])


def of_model(number: int, value: Any) -> Any:
    """One model's tensor of a Stacked; all else as it is."""
    return value.of(number) if isinstance(value, Stacked) else value


def _agreed(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """The values of one model are asked for: those of all, if they are the same."""
    stacked = [value for value in (*args, *kwargs.values()) if isinstance(value, Stacked)]
    if name in _ONE_NUMBER and stacked and stacked[0].numel() == 1:
        values = [func(one) for one in stacked[0].front().reshape(-1).detach().cpu()]
        if all(value == values[0] for value in values):
            note(name, "agreed")
            return values[0]
    raise NotFusableError(f"{name} asks for the values of one model. result.of(i) has them")


def all_common(*values: Any) -> bool:
    """Whether every tensor of the array in these is one that all models share."""
    for value in values:
        if isinstance(value, Stacked):
            if value.common is None:
                return False
        elif isinstance(value, list | tuple):
            if not all_common(*value):
                return False
        elif isinstance(value, dict) and not all_common(*value.values()):
            return False
    return True


def _read_property(func: Any, args: Sequence[Any]) -> Any:
    name = func.__self__.__name__
    tensor: Stacked = args[0]
    if name in _TELLS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)
    if name in ("T", "mT", "H", "mH"):
        turned = tensor.transpose(-1, -2) if tensor.dim() > 1 else tensor
        return turned.conj() if name.endswith("H") and tensor.is_complex() else turned
    if name == "real" and not tensor.is_complex():
        return tensor
    if name == "data":
        return Stacked(tensor.physical.data, tensor.count, tensor.order)
    if name in ("requires_grad", "is_leaf"):
        return getattr(tensor.physical, name)
    if name == "grad" and not isinstance(tensor.physical, torch.nn.Parameter):
        return None
    raise NotFusableError(f"fused models do not support {name} of a tensor")
