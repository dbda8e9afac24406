"""The hook that sees what autograd saves in this thread: put in place, taken away, put back."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.saved.follower import unpack_held

if TYPE_CHECKING:
    from collections.abc import Callable

_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_top = torch._C._autograd._top_saved_tensors_default_hooks
_THREAD = threading.local()  # `hook`: of the pass that is under way in this thread


class PackHook:
    """Of one pass. Where it rests, autograd saves tensors as if there were none.

    Thousands of small objects live from forward to backward: the collector would search all of them
    again and again, and find no garbage. It rests during the pass.
    """

    __slots__ = ("__weakref__", "_collects", "in_place")

    def __init__(self) -> None:
        self.in_place = False
        self._collects = False

    def begin(self) -> None:
        _THREAD.hook = weakref.ref(self)
        self._collects = gc.isenabled()
        gc.disable()

    def put(self, pack: Callable[[torch.Tensor], Any]) -> None:
        _push(pack, unpack_held)
        self.in_place = True

    def take_away(self) -> None:
        """Only where no other hook was put above it: by itself, or at the end."""
        if self.in_place:
            _pop()
            self.in_place = False

    def end(self) -> None:
        _THREAD.hook = None
        self.take_away()
        if self._collects:
            gc.enable()


def other_hooks_are_active() -> bool:
    return _top(False) is not None


def is_following() -> bool:
    """Whether a pass of this thread follows a plan, also where its hook rests."""
    reference = getattr(_THREAD, "hook", None)
    return reference is not None and reference() is not None
