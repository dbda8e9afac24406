"""Whether a tensor could be encoded is computed on the device; the host hardly waits for it.

The plain tensor stays until the answer has arrived, which is asked for whenever another one is
encoded. A host that is far ahead of its device would hold all of them: it stays a few behind. On
CPUs there is nothing to wait for, and no check is made.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Protocol

import torch

from stepscope.fix.saved.graph_capture import is_capturing

_MOST_WAITING = 2  # while the device works on what lies between them


class PlainTensor(Protocol):
    """A tensor that is kept, and knows whether it was changed in place."""

    def unpack(self) -> torch.Tensor: ...


class PendingCheck:
    """Of one encoded tensor."""

    def __init__(self, fits: torch.Tensor) -> None:
        self._answer = torch.empty((), dtype=torch.bool, pin_memory=fits.device.type == "cuda")
        self._answer.copy_(fits, non_blocking=True)
        self._arrived: Any = None
        if fits.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._plain: PlainTensor | None = None
        self._known = False
        _WAITING.append(weakref.ref(self))

    def keep_until_known(self, plain: PlainTensor) -> None:
        """Call it once, right after encoding."""
        self._plain = plain

    def settle(self) -> bool:
        """Drop the plain tensor if the answer is there and says so; False while it is not."""
        if not self._known and (self._arrived is None or self._arrived.query()):
            self._known = True
            if bool(self._answer):
                self._plain = None
        return self._known

    def wait(self) -> None:
        if not self._known and self._arrived is not None:
            self._arrived.synchronize()
        self.settle()

    def plain(self) -> torch.Tensor | None:
        """The tensor, if it could not be encoded. Waits for the answer: backward needs it now."""
        self.wait()
        if not bool(self._answer) and self._plain is None:
            raise RuntimeError("a tensor that could not be encoded was not kept either")
        return None if self._plain is None else self._plain.unpack()


_WAITING: deque[weakref.ref[PendingCheck]] = deque()


def settle_waiting() -> None:
    """Answers arrive in order: stop at the first that has not, unless too many wait. While a CUDA
    graph is captured, no event may be asked."""
    while _WAITING and not is_capturing():
        check = _WAITING[0]()
        if check is not None and not check.settle():
            if len(_WAITING) <= _MOST_WAITING:
                return
            check.wait()
        _WAITING.popleft()
