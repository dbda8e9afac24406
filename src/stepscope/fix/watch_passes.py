"""Note where a script calls its models, starts backward passes, clips gradients and steps."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stepscope.fix.compiled_modules import torchs_forward
from stepscope.fix.frames import is_users, users_frames
from stepscope.records.script_facts import RootCall, TrainingPass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import Frame

_PASSES = 16  # that are looked at
_MOST_PLACES = 8
_IMAGE_DIMS = (4, 5)


class PassWatch:
    """Listens until enough passes were seen."""

    def __init__(self, training: TrainingProcess) -> None:
        self._calls: dict[int, RootCall] = {}  # of roots that are part of a pass
        self._waiting: dict[int, RootCall] = {}  # of roots whose backward pass is still to come
        self._forwards: dict[tuple[Frame, ...], None] = {}
        self._passes: dict[TrainingPass, None] = {}
        self._seen = 0
        self._clip: tuple[Frame, ...] = ()
        self.closure = False
        training.around_root(self._root_called)
        training.before_backward(self._backward_begins)
        training.before_clipping(self._clipping)
        training.before_step_call(self._step_called)

    @property
    def content(self) -> dict[str, Any]:
        """For ScriptFacts."""
        return {
            "passes": tuple(self._passes)[:_MOST_PLACES],
            "root_calls": tuple(self._calls.values()),
            "clip": self._clip,
            "closure": self.closure,
        }

    def _root_called(self, module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self._seen >= _PASSES:
            return
        frames = users_frames()
        if len(self._forwards) < _MOST_PLACES:
            self._forwards.setdefault(frames)
        if id(module) not in self._calls:
            self._waiting[id(module)] = RootCall(
                type=type(module).__name__,
                frames=frames,
                names=tuple(_name_of(module, frame) for frame in _frame_objects(len(frames))),
                images=tuple(_images(args, kwargs)),
                torchs_forward=torchs_forward(module),
            )

    def _backward_begins(self, _outputs: Any) -> None:
        if self._seen >= _PASSES:
            return
        self._seen += 1
        self._calls |= self._waiting
        self._waiting.clear()
        if self._forwards:
            forwards = tuple(self._forwards)
            self._passes.setdefault(TrainingPass(forwards=forwards, backward=users_frames()))
        self._forwards.clear()

    def _clipping(self) -> None:
        self._clip = self._clip or users_frames()

    def _step_called(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.closure = self.closure or any(callable(v) for v in (*args, *kwargs.values()))


def _images(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[str]:
    for name, value in (*enumerate(args), *kwargs.items()):
        if getattr(value, "ndim", 0) in _IMAGE_DIMS and _is_floating(value):
            yield str(name)


def _is_floating(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _frame_objects(most: int) -> Iterator[FrameType]:
    """The frames that users_frames() names."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and most:
        if is_users(frame.f_code.co_filename):
            most -= 1
            yield frame
        frame = frame.f_back


def _name_of(module: Any, frame: FrameType) -> str:
    """What a frame calls an object: a variable, or an attribute of its `self`."""
    for names in (frame.f_locals, frame.f_globals):
        for name, value in list(names.items()):
            if value is module:
                return name
    owner = frame.f_locals.get("self")
    held = getattr(owner, "__dict__", {})
    for names in (held, held.get("_modules") or {}):
        for name, value in list(names.items()):
            if value is module:
                return f"self.{name}"
    return ""
