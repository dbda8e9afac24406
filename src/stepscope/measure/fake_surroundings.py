"""What a script meets when its tensors are fake: loaders, modules, scalers and arrays that cope."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from stepscope.measure.made_up_values import values_of_fakes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_IN_THIS_PROCESS = {
    "num_workers": 0,
    "pin_memory": False,
    "persistent_workers": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "timeout": 0,
}


def import_from_texts(texts: Mapping[str, str]) -> None:
    """Modules as the editor has them, by resolved path; all others come from their files."""
    from importlib.machinery import SourceFileLoader

    from_file = SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        text = texts.get(os.path.realpath(self.path))
        if text is None:
            return from_file(self, fullname)
        return compile(text, self.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def load_for_real(fake: Any, given: Callable[[Any], None]) -> None:
    """Data loaders work with real numbers, in this process; their batches become fake."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_map
    from torch.utils.data import dataloader

    owner, loader = dataloader._BaseDataLoaderIter, dataloader.DataLoader
    following, begin, create = owner.__next__, loader.__iter__, loader.__init__

    def to_fake(value: Any) -> Any:
        if not hasattr(value, "untyped_storage"):
            return value
        tensor = value if isinstance(value, FakeTensor) else fake.from_tensor(value)
        given(tensor)
        return tensor

    def next_batch(self: Any) -> Any:
        with _disable_current_modes(), values_of_fakes():  # a dataset may hold fake tensors
            batch = following(self)
        return tree_map(to_fake, batch)

    def iterate(self: Any) -> Any:
        with _disable_current_modes():
            return begin(self)

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **{name: _IN_THIS_PROCESS.get(name, kwargs[name]) for name in kwargs})

    owner.__next__ = next_batch
    loader.__iter__ = iterate
    loader.__init__ = initialise


def move_modules() -> None:
    """As Module.to, which cannot move fake parameters; shared ones stay shared."""
    from torch import nn

    moved: dict[int, tuple[Any, Any]] = {}  # by the old one, which is held so that its id stays
    depth = 0  # of modules in modules: `moved` is of one outermost call

    def move(old: Any, change: Any) -> Any:
        if id(old) not in moved:
            new = change(old.detach())
            same = new.device == old.device and new.dtype == old.dtype
            parameter = old if same else nn.Parameter(new, old.requires_grad)
            moved[id(old)] = (old, parameter)
        return moved[id(old)][1]

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        nonlocal depth
        depth += 1
        for child in self.children() if recurse else ():
            child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = move(parameter, fn)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        depth -= 1
        if not depth:
            moved.clear()
        return self

    nn.Module._apply = apply


def always_step() -> None:
    """A GradScaler would skip the step: it reads a made-up number of infinities."""
    from torch.amp.grad_scaler import GradScaler

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        del self, state
        return optimizer.step(*args, **kwargs)

    GradScaler._maybe_opt_step = step


def make_arrays_up() -> None:
    """Arrays and lists of fake tensors hold zeros; deep copies are fake too."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    to_array, to_list = torch.Tensor.numpy, torch.Tensor.tolist

    def zeros(tensor: Any) -> Any:
        import numpy as np

        name = str(tensor.dtype).removeprefix("torch.")
        return np.zeros(tuple(tensor.shape), name if hasattr(np, name) else "float32")

    def numpy(self: Any, **options: Any) -> Any:
        return zeros(self) if isinstance(self, FakeTensor) else to_array(self, **options)

    def tolist(self: Any) -> Any:
        return zeros(self).tolist() if isinstance(self, FakeTensor) else to_list(self)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    torch.Tensor.numpy, torch.Tensor.tolist = numpy, tolist
    FakeTensor.__deepcopy__ = deepcopy
