"""Which of several right ways computes an operator: by rule, or by measuring each once.

A way is measured forward and backward, on this device, with tensors of these shapes, from and to
the layout of its input. The fastest is kept for this run and for later ones (cache.py).
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from stepscope.errors import UsageError
from stepscope.fix.choice_cache import ChoiceCache
from stepscope.fix.fuse.stacked import is_ordinary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Way = Callable[..., torch.Tensor]

Choose = Literal["measure", "rules"]
_TIMES = 3
_LEAST_WORK = 1 << 24  # multiplications: below, a CPU computes faster than it chooses
_current: list[Chooser] = []


class WayToChoose(NamedTuple):
    """An operator that can be computed in several ways. Each takes the same tensors."""

    name: str
    tensors: Sequence[torch.Tensor]
    settings: tuple[Any, ...]  # what else decides, such as a stride
    usual: str  # the way that the rules would take
    ways: Callable[[], dict[str, Way]]
    work: Callable[[], int]  # multiplications

    def key(self) -> tuple[Any, ...]:
        """Equal for calls that take equally long."""
        kind = self.tensors[0].device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        facts = ((tuple(one.shape), one.stride(), one.dtype) for one in self.tensors)
        return (self.name, *facts, self.settings, autocast)


class Chooser:
    """The choices of one array."""

    def __init__(self, how: Choose) -> None:
        if how not in ("measure", "rules"):
            raise UsageError(f'choose is "measure" or "rules", not {how!r}')
        self._how = how
        self._caches: dict[torch.device, ChoiceCache] = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def pick(self, operator: WayToChoose) -> str:
        """The name of the way to take."""
        if self._how == "rules":
            return operator.usual
        key = operator.key()
        chosen = self._known.get(key)
        if chosen is None:
            chosen = self._look_up_or_measure(operator, key)
        return chosen

    def choices(self) -> dict[str, str]:
        """What was measured: the fastest way of each call."""
        return {_words(key): way for key, way in self._known.items()}

    @contextmanager
    def used(self) -> Iterator[None]:
        _current.append(self)
        try:
            yield
        finally:
            _current.pop()

    def _look_up_or_measure(self, operator: WayToChoose, key: tuple[Any, ...]) -> str:
        first = operator.tensors[0]
        if first.device.type == "cpu" and operator.work() < _LEAST_WORK:
            return operator.usual
        cache = self._caches.get(first.device)
        if cache is None:
            cache = self._caches[first.device] = ChoiceCache.of_device("fuse", first.device)
        chosen = cache.get(_words(key))
        if chosen not in operator.ways():
            if not _is_measurable(operator.tensors):
                return operator.usual
            chosen = fastest(operator)
            cache.put(_words(key), chosen)
        self._known[key] = chosen
        return chosen


def _words(key: tuple[Any, ...]) -> str:
    return " ".join(str(part).replace("torch.", "") for part in key)


def usual_choice(model: torch.nn.Module) -> Choose:
    """Measuring pays where a step is short and trained often: on a GPU."""
    on_cuda = any(one.device.type == "cuda" for one in model.parameters())
    return "measure" if on_cuda else "rules"


def chooser() -> Chooser:
    """That of the array that computes now; elsewhere rules decide."""
    return _current[-1] if _current else Chooser("rules")


def fastest(operator: WayToChoose) -> str:
    """The way with the least time; the usual one if none can be measured."""
    times: dict[str, float] = {}
    for name, way in operator.ways().items():
        try:
            times[name] = _seconds(way, operator.tensors)
        except (RuntimeError, NotImplementedError):  # this way is none here, or out of memory
            continue
    return min(times, key=lambda name: times[name], default=operator.usual)


def _seconds(way: Way, tensors: Sequence[torch.Tensor]) -> float:
    """Of the fastest of a few passes, forward and backward."""
    with torch.enable_grad():
        own = [one.detach().clone().requires_grad_(one.requires_grad) for one in tensors]
        learn = [one for one in own if one.requires_grad]
        device = own[0].device
        best = float("inf")
        for number in range(1 + _TIMES):  # the first lets libraries choose their kernels
            _wait(device)
            start = time.perf_counter()
            result = way(*own)
            if learn:
                torch.autograd.grad(result, learn, torch.ones_like(result))
            _wait(device)
            if number:
                best = min(best, time.perf_counter() - start)
        return best


def _is_measurable(tensors: Sequence[torch.Tensor]) -> bool:
    """Real values, and no graph that is being captured."""
    if not all(map(is_ordinary, tensors)):
        return False
    return not (tensors[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
