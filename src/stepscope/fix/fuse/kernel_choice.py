"""Choose between several right ways to compute an operator: by rule, by measuring each once,
and Triton kernels only where they give what torch gives.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stepscope.errors import UsageError
from stepscope.fix.choice_cache import ChoiceCache
from stepscope.fix.fuse.ledger import innermost
from stepscope.fix.fuse.stacked import is_capturing, is_ordinary

if TYPE_CHECKING:
    Way = Callable[..., torch.Tensor]

# A way is measured forward and backward, on this device, with tensors of these shapes, and with the
# copies that bring its result to the layout that the next operator takes. The fastest is kept for
# this run and for later ones (choice_cache.py). A captured or compiled step has few launches, so
# for it only the device's time counts.

Choose = Literal["measure", "rules"]
_TIMES = 5  # the shortest counts: other processes only ever make a pass longer
_LONGEST_WAIT = 0.05  # seconds
_CYCLES = 2e9  # a second: the clock of a GPU, about
_GENERATION = 2  # of the ways; raised when one gets faster, so that all are measured again
_CACHE = f"fuse-{_GENERATION}"
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
        learned = torch.is_grad_enabled()
        gradients = tuple(learned and one.requires_grad for one in self.tensors)
        return (self.name, *facts, self.settings, autocast, gradients)


class Chooser:
    """The choices of one array."""

    def __init__(self, how: Choose) -> None:
        if how not in ("measure", "rules"):
            raise UsageError(f'choose is "measure" or "rules", not {how!r}')
        self._how = how
        self.launches_count = True  # False for a step that is captured
        self._caches: dict[torch.device, ChoiceCache] = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def pick(self, operator: WayToChoose) -> str:
        """The name of the way to take."""
        if self._how == "rules":
            return operator.usual
        key = (*operator.key(), *(() if self._counts_launches(operator) else ("launched at once",)))
        chosen = self._known.get(key)
        if chosen is None:
            chosen = self._look_up_or_measure(operator, key)
        return chosen

    def choices(self) -> dict[str, str]:
        """Return what was measured: the fastest way of each call."""
        return {_words(key): way for key, way in self._known.items()}

    def used(self) -> AbstractContextManager[None]:
        return innermost(_current, self)

    def _counts_launches(self, operator: WayToChoose) -> bool:
        """A CPU computes what it launches."""
        on_cpu = operator.tensors[0].device.type != "cuda"
        return on_cpu or (self.launches_count and all(map(is_ordinary, operator.tensors)))

    def _look_up_or_measure(self, operator: WayToChoose, key: tuple[Any, ...]) -> str:
        device = operator.tensors[0].device
        if device.type == "cpu" and operator.work() < _LEAST_WORK:
            return operator.usual
        if device not in self._caches:
            self._caches[device] = ChoiceCache.of_device(_CACHE, device)
        cache = self._caches[device]
        chosen = cache.get(_words(key))
        if chosen not in operator.ways():
            chosen = _measured(operator, self._counts_launches(operator))
            if chosen is None:
                return operator.usual
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


def fastest(operator: WayToChoose, launches_count: bool = True) -> str:
    """The way with the least time; the usual one if none can be measured."""
    times: dict[str, float] = {}
    for name, way in operator.ways().items():
        try:
            measure = _seconds if launches_count else _device_seconds
            times[name] = measure(way, operator.tensors)
        except (RuntimeError, NotImplementedError):  # this way is none here, or out of memory
            continue
    return min(times, key=lambda name: times[name], default=operator.usual)


def _seconds(way: Way, tensors: Sequence[torch.Tensor]) -> float:
    """Return the shortest of a few passes, forward and backward."""
    run, device = _pass_of(way, tensors), tensors[0].device
    times = []
    for _ in range(1 + _TIMES):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first lets libraries choose their kernels


def _device_seconds(way: Way, tensors: Sequence[torch.Tensor]) -> float:
    """The same without the host: it launches a pass while the device is kept waiting."""
    run, device = _pass_of(way, tensors), tensors[0].device
    best = float("inf")
    with torch.cuda.device(device):
        for _ in range(2):
            start = time.perf_counter()
            run()
            launching = time.perf_counter() - start
            _wait(device)
        ahead = int(min(2 * launching, _LONGEST_WAIT) * _CYCLES)
        for _ in range(_TIMES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(ahead)
            begin.record()
            run()
            end.record()
            _wait(device)
            best = min(best, begin.elapsed_time(end) / 1e3)
    return best


def _pass_of(way: Way, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Forward and backward, with tensors of its own."""
    own = [one.detach().clone().requires_grad_(one.requires_grad) for one in tensors]
    learn = [one for one in own if one.requires_grad]

    def run() -> None:
        with torch.enable_grad():
            result = way(*own)
            if learn:
                torch.autograd.grad(result, learn, torch.ones_like(result))

    return run


def _measured(operator: WayToChoose, launches_count: bool) -> str | None:
    """The fastest way; None while a graph is captured, or where sizes are not known yet."""
    first = operator.tensors[0]
    if first.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    if all(map(is_ordinary, operator.tensors)):
        return fastest(operator, launches_count)
    sizes = (size for one in operator.tensors for size in (*one.shape, *one.stride()))
    if any(type(size) is not int for size in sizes):
        return None
    with _disable_current_modes():  # a compiler records: measure beside it
        tensors = list(map(_with_values, operator.tensors))
        return fastest(operator._replace(tensors=tensors), launches_count)


def _with_values(like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape and layout that holds random values."""
    room = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    values = torch.zeros(room, dtype=like.dtype, device=like.device)
    if like.is_floating_point():
        values.normal_(generator=torch.Generator(like.device).manual_seed(0))
    return values.as_strided(like.shape, like.stride()).requires_grad_(like.requires_grad)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Triton kernels of this package, where they run and give what torch gives.
#
# A kernel module has `agrees(device)`, which compares it with torch on a small example. It is asked
# once for each device; without Triton, or where the two differ, torch computes as before.

_known: dict[tuple[str, torch.device], Any] = {}


def proven_kernels(module: str, tensor: torch.Tensor) -> Any:
    """The module, for tensors on this one's device; None where torch has to compute."""
    on_cuda = tensor.is_cuda
    if not (on_cuda or os.environ.get("TRITON_INTERPRET") == "1") or not is_ordinary(tensor):
        return None
    key = (module, tensor.device)
    if key not in _known:
        if on_cuda and is_capturing():
            return None
        try:
            kernels = import_module(f"stepscope.fix.fuse.{module}")
            _known[key] = kernels if kernels.agrees(tensor.device) else None
        except Exception:  # no Triton, no compiler for it, or a device that it does not know
            _known[key] = None
    return _known[key]
