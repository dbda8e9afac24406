"""Count a script's steps without stepscope: put on PYTHONPATH of the bare run by field.py.

Every process that trains writes one file into $FIELD_COUNTS, a line at each call: the time, and the
number of the optimizer that steps, -1 for a backward pass, or -2 where a data loader begins an
epoch. A process that is killed, or ends by os._exit, has counted too. torch is imported at once:
nobody's import order matters here.
"""

import os
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from time import perf_counter_ns
from typing import Any

BACKWARD, EPOCH = -1, -2


class _Calls:
    """The calls of one process; optimizers are numbered in the order of their first step."""

    def __init__(self) -> None:
        self.pid = 0

    def add(self, optimizer: Any = None, number: int = BACKWARD) -> None:
        if self.pid != os.getpid():  # a forked child counts for itself
            self._start()
        if optimizer is not None:
            number = self.numbers.setdefault(optimizer, len(self.numbers))
        os.write(self.file, f"{perf_counter_ns()} {number}\n".encode())

    def _start(self) -> None:
        self.pid = os.getpid()
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        path = f"{os.environ['FIELD_COUNTS']}/{self.pid}"
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _count(calls: _Calls) -> None:
    import torch

    decorate = torch.optim.Optimizer.profile_hook_step
    backward = torch.autograd.backward

    def counted_step(step: Callable[..., Any]) -> Callable[..., Any]:
        profiled = decorate(step)

        @wraps(profiled)
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.add(self)
            return profiled(self, *args, **kwargs)

        return counted

    @wraps(backward)
    def counted_backward(*args: Any, **kwargs: Any) -> Any:
        calls.add()
        return backward(*args, **kwargs)

    loader = torch.utils.data.DataLoader
    begins = loader.__iter__

    @wraps(begins)
    def counted_epoch(self: Any) -> Any:
        calls.add(number=EPOCH)
        return begins(self)

    loader.__iter__ = counted_epoch  # type: ignore[method-assign]
    torch.optim.Optimizer.profile_hook_step = staticmethod(counted_step)
    torch.autograd.backward = counted_backward


if os.environ.get("FIELD_COUNTS"):
    try:
        _count(_Calls())
    except Exception as error:
        print(f"the counter could not be installed: {error}", file=sys.stderr)
