"""Tensors that a model's code makes of nothing.

Of random ones, such as torch.rand(3), each model has its own. Others, such as torch.zeros(3), are
one for all until the code writes into them.
"""

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
_EQUAL = {torch.zeros, torch.ones, torch.empty, torch.full}
_paused: list[bool] = []


class OwnDraws(TorchFunctionMode):
    """Meanwhile `count` models compute: what is made of nothing is made for each."""

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
        if func in _EQUAL and not _paused:
            new = func(*args, **kwargs)
            return new if isinstance(new, Stacked) else Stacked.share(new, self._count)
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
