"""Random tensors that a model's code makes of nothing, such as torch.rand(3): each has its own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from stepscope.fix.fuse.ledger import note
from stepscope.fix.fuse.model_streams import streams
from stepscope.fix.fuse.stacked import Stacked, all_common

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_DRAWING = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}
_paused: list[bool] = []


class OwnDraws(TorchFunctionMode):
    """Meanwhile random tensors are drawn for each of `count` models."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _DRAWING or _paused or not all_common(args, kwargs):
            return func(*args, **kwargs)
        note(func.__name__, "one by one")
        drawn = []
        for model in range(self._count):
            with streams().of(model), as_drawn_alone():
                drawn.append(func(*args, **kwargs))
        return Stacked(torch.stack(drawn), self._count)


@contextmanager
def as_drawn_alone() -> Iterator[None]:
    """Meanwhile one model computes, and draws for itself."""
    _paused.append(True)
    try:
        yield
    finally:
        _paused.pop()
