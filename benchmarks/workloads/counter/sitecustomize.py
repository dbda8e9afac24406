"""Count a script's steps without stepscope: put on PYTHONPATH of the bare run by field.py.

Every process that trains writes one file into $FIELD_COUNTS and rewrites it at each call, so that a
process that is killed, or ends by os._exit, has counted too. torch is imported at once: the bare
run has nobody whose import order matters.
"""

import json
import os
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any


class _Counts:
    """Calls of one process: backward passes, and step() of each optimizer in order of creation."""

    def __init__(self) -> None:
        self.pid = 0
        self.file = -1

    def start_here(self) -> None:
        """A forked child counts for itself."""
        if self.pid == os.getpid():
            return
        self.pid = os.getpid()
        self.backward = 0
        self.optimizers: list[int] = []
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        path = f"{os.environ['FIELD_COUNTS']}/{self.pid}.json"
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT)

    def add_backward(self) -> None:
        self.start_here()
        self.backward += 1
        self._write()

    def add_step(self, optimizer: Any) -> None:
        self.start_here()
        if optimizer not in self.numbers:
            self.numbers[optimizer] = len(self.optimizers)
            self.optimizers.append(0)
        self.optimizers[self.numbers[optimizer]] += 1
        self._write()

    def _write(self) -> None:
        counts = {"rank": os.environ.get("RANK"), "backward": self.backward}
        os.pwrite(self.file, json.dumps({**counts, "optimizers": self.optimizers}).encode(), 0)


def _count(counts: _Counts) -> None:
    import torch

    decorate = torch.optim.Optimizer.profile_hook_step
    backward = torch.autograd.backward

    def counted_step(step: Callable[..., Any]) -> Callable[..., Any]:
        profiled = decorate(step)

        @wraps(profiled)
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts.add_step(self)
            return profiled(self, *args, **kwargs)

        return counted

    @wraps(backward)
    def counted_backward(*args: Any, **kwargs: Any) -> Any:
        counts.add_backward()
        return backward(*args, **kwargs)

    torch.optim.Optimizer.profile_hook_step = staticmethod(counted_step)
    torch.autograd.backward = counted_backward


if os.environ.get("FIELD_COUNTS"):
    try:
        _count(_Counts())
    except Exception as error:
        print(f"the counter could not be installed: {error}", file=sys.stderr)
