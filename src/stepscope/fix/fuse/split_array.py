"""Models that may not fit into memory together: arrays that train one after the other.

    array = fuse_to_fit(models, optimizers, memory_limit=12 << 30)
    losses = array.train_step(loss, pictures, labels)      # loss(model, pictures, labels)

An array that runs out of memory, in whatever part of a step, is put back to where the step began
and cut in two halves, which train the same step one after the other: no step is lost, and every
model trains as it would have.
"""

from __future__ import annotations

import copy
import gc
import itertools
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from stepscope.errors import UsageError
from stepscope.fix.fuse.array import ModelArray, fuse
from stepscope.fix.fuse.stacked import Stacked
from stepscope.fix.memory_meters import allocatable_bytes, is_out_of_memory, meter_on
from stepscope.fix.random_states import restore, states_now

if TYPE_CHECKING:
    Loss = Callable[..., Any]  # loss(model, *inputs)

_TEMPORARIES = 8  # tensors of one weight's size that its update makes at most


class SplitArray:
    """Train models by number, in one array or several; `fuse_to_fit` makes it."""

    def __init__(self, array: ModelArray, memory_limit: int | None = None, **options: Any) -> None:
        """`options` are those of `fuse` for arrays to come."""
        self.arrays, self._options = [array], options
        self.halvings: list[str] = []  # one line for each time that memory ran out
        self._order: list[nn.Module] = _models(array)
        self._places = _numbered(self._order)
        self._limit = memory_limit
        self._most: int | None = None  # models of an array, once that is known
        self._proven: WeakSet[ModelArray] = WeakSet()  # arrays whose optimizer has stepped
        self._steps = 0

    # Training.

    def train_step(
        self, loss: Loss, *inputs: Any, clip: float | Sequence[float] | None = None
    ) -> torch.Tensor:
        """One step of every model: `loss(model, *inputs)`, backward, gradients clipped to the norm
        `clip`, optimizer. Returns every model's loss.

        An input is one tensor that all models share, or a list with one for each. Models whose
        inputs differ in shape, such as an epoch's last batch, step one group after the other.
        """
        if self._limit is not None and self._most is None:
            self._cut_to_fit(loss, inputs)
        losses: dict[int, torch.Tensor] = {}
        work = deque((array, tuple(range(len(array)))) for array in self.arrays)
        while work:
            array, places = work.popleft()
            given = [self._own(array, one) for one in inputs]
            now = _alike(given, places)
            limits = self._own(array, list(clip) if isinstance(clip, tuple) else clip)
            try:
                values = _StepOfSome(array, now, self._proven).run(loss, given, limits)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if len(array) == 1:
                    error.add_note(f"model {self._place_of(array[0])} alone does not fit")
                    raise
                values = None
            if values is None:
                work.extendleft(reversed(self._halve(array, places)))
                continue
            losses |= {self._place_of(array[place]): values[place] for place in now}
            if rest := tuple(place for place in places if place not in now):
                work.appendleft((array, rest))
        self._steps += 1
        return torch.stack([losses[place] for place in range(len(self))])

    def step_schedulers(self, metrics: Sequence[float] | None = None) -> None:
        """Every model's scheduler; `metrics` are one for each, where they take one."""
        for array in self.arrays:
            array.step_schedulers(None if metrics is None else self._own(array, metrics))

    def drawing_as(self, model: int) -> AbstractContextManager[None]:
        """Meanwhile torch draws this model's random numbers."""
        array, place = self._find(model)
        return array.drawing_as(place)

    def train(self, mode: bool = True) -> SplitArray:
        for array in self.arrays:
            array.train(mode)
        return self

    def eval(self) -> SplitArray:
        return self.train(False)

    # The models.

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, model: int) -> nn.Module:
        return self._order[model]

    def state_of(self, model: int) -> dict[str, torch.Tensor]:
        """A plain state dict that loads into the unfused program."""
        array, place = self._find(model)
        return array.state_of(place)

    def evict(self, model: int) -> nn.Module:
        """Take one model out; it and its optimizer go on alone."""
        array, place = self._find(model)
        if len(self) == 1:
            raise UsageError("the last model cannot be removed")
        gone = self._order.pop(model)
        self._places = _numbered(self._order)
        if len(array) > 1:
            array.evict(place)
        else:
            array.release()
            self.arrays.remove(array)
        self._proven.discard(array)
        return gone

    def admit(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        seed: int | None = None,
        random: list[Any] | None = None,
    ) -> int:
        """Add a model to the smallest array that has room, or in one of its own; its place."""
        smallest = min(self.arrays, key=len)
        if self._most is None or len(smallest) < self._most:
            smallest.admit(model, optimizer, scheduler, seed, random)
            self._proven.discard(smallest)
        else:
            own = [] if optimizer is None else [optimizer]
            plans = [] if scheduler is None else [scheduler]
            states = None if random is None else [random]
            self.arrays.append(fuse([model], own, plans, [seed], states, **self._options))
        self._order.append(model)
        self._places = _numbered(self._order)
        return len(self) - 1

    def checkpoint(self) -> dict[str, Any]:
        """Return what training goes on from, by array, and which models each holds."""
        members = [[self._place_of(one) for one in _models(array)] for array in self.arrays]
        saved = [array.checkpoint() for array in self.arrays]
        return {"members": members, "arrays": saved, "most": self._most}

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint, in arrays cut as they were then."""
        members: list[list[int]] = saved["members"]
        if sorted(itertools.chain(*members)) != list(range(len(self))) or len(self.arrays) > 1:
            raise UsageError(
                f"the checkpoint has {sum(map(len, members))} models. Resume it with as many "
                f"models, not with {len(self)}"
            )
        (array,) = self.arrays
        own = array.optimizer.optimizers if array.optimizer is not None else []
        plans = array.schedulers
        self.arrays = []
        for places, state in zip(members, saved["arrays"], strict=True):
            part = fuse(
                [self._order[place] for place in places],
                [own[place] for place in places if own],
                [plans[place] for place in places if plans],
                **self._options,
            )
            part.resume(state)
            self.arrays.append(part)
        self._most = saved["most"]

    def report(self) -> dict[str, Any]:
        """Return the first array's report, and how all were cut."""
        sizes = [len(array) for array in self.arrays]
        return {**self.arrays[0].report(), "arrays": sizes, "halvings": list(self.halvings)}

    # Inside.

    def _cut_to_fit(self, loss: Loss, inputs: Sequence[Any]) -> None:
        """Cut into arrays of about one size, as the first model and its batch allow."""
        first = self.arrays[0]
        if first.optimizer is None:
            raise UsageError("these models were fused without optimizers. Give one for each model")
        batch = [_change_lists(itemgetter(0), one) for one in inputs]
        optimizer = first.optimizer.optimizers[0]
        fit = largest_array(first[0], optimizer, loss, *batch, memory=self._limit)
        self._most = most = max(1, fit.low)
        rest = self.arrays.pop()
        while len(rest) > most:
            arrays_left = -(-len(rest) // most)
            part, rest = rest.cut(-(-len(rest) // arrays_left))
            self.arrays.append(part)
        self.arrays.append(rest)

    def _halve(
        self, array: ModelArray, places: Sequence[int]
    ) -> list[tuple[ModelArray, tuple[int, ...]]]:
        """The halves, and which of their models have this step still before them."""
        middle = len(array) // 2
        self.halvings.append(
            f"step {self._steps + 1}: out of memory with {len(array)} models at once. From "
            f"now on {middle} and {len(array) - middle} train in turns"
        )
        self._most = min(len(array) - middle, self._most or len(array))
        at = self.arrays.index(array)
        array.zero_grad()
        self.arrays[at : at + 1] = halves = array.cut(middle)
        # What the failed step held, so that the halves get it.
        device = next(array.parameters()).device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        first = tuple(place for place in places if place < middle)
        second = tuple(place - middle for place in places if place >= middle)
        return [(half, own) for half, own in zip(halves, (first, second), strict=True) if own]

    def _find(self, model: int) -> tuple[ModelArray, int]:
        wanted = self._order[model]
        return next(
            (array, place)
            for array in self.arrays
            for place, one in enumerate(_models(array))
            if one is wanted
        )

    def _place_of(self, model: nn.Module) -> int:
        return self._places[id(model)]

    def _own(self, array: ModelArray, value: Any) -> Any:
        """With the array's part of every list with one value for each model."""

        def part(values: list[Any]) -> list[Any]:
            if len(values) != len(self):
                raise UsageError(f"{len(values)} values for {len(self)} models: give one for each")
            return [values[self._place_of(model)] for model in _models(array)]

        return _change_lists(part, value)


class _StepOfSome:
    """One step of some models of an array; the others stay as they are."""

    def __init__(
        self, array: ModelArray, places: tuple[int, ...], proven: WeakSet[ModelArray]
    ) -> None:
        self._array, self._places, self._proven = array, places, proven
        self._others = [place for place in range(len(array)) if place not in places]
        self._before, self._random = array.changing(), states_now()
        self._weights: list[torch.Tensor] | None = None
        self._states: Any = None

    def run(
        self, loss: Loss, inputs: Sequence[Any], clip: float | Sequence[float] | None
    ) -> torch.Tensor:
        """Every model's loss. When memory runs out, all is as it was before."""

        def lend(values: list[Any]) -> list[Any]:
            """Models that stay compute with the first one's input; nothing of it is kept."""
            first = values[self._places[0]]
            return [first if place in self._others else one for place, one in enumerate(values)]

        try:
            return self._run(loss, [_change_lists(lend, one) for one in inputs], clip)
        except Exception as error:
            if is_out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # they hold what the step computed
                self._restore()
            raise

    def _run(self, loss: Loss, inputs: Sequence[Any], clip: Any) -> torch.Tensor:
        array = self._array
        array.zero_grad()
        losses = array.apply_each(partial(loss, array), *inputs)
        array.backward(losses)
        values = losses.front() if isinstance(losses, Stacked) else torch.stack(list(losses))
        values = values.detach().clone()
        del losses
        if clip is not None:
            array.clip_grad_norm_(clip)
        if self._may_run_out():  # weights go to the host: the device is short of memory
            self._weights = [one.detach().to("cpu", copy=True) for one in array.parameters()]
            if array.optimizer is not None:
                self._states = array.optimizer.copies()
        skipped = [place in self._others for place in range(len(array))]
        array.step(skipped if self._others else None)
        if self._others:
            array.undo(self._before, self._others)
        self._proven.add(array)
        return values

    def _may_run_out(self) -> bool:
        """Whether the optimizer may find no memory halfway: the first time that it makes its
        states, and when hardly more is left than one weight's update needs."""
        stacks = list(self._array.parameters())
        device = stacks[0].device
        if self._array not in self._proven or device.type != "cuda":
            return True
        largest = max(stack.nbytes for stack in stacks)
        return allocatable_bytes(device) < 2 * _TEMPORARIES * int(largest)

    def _restore(self) -> None:
        self._array.zero_grad()
        self._array.undo(self._before)
        restore(self._random)
        if self._weights is None:
            return
        with torch.no_grad():
            for stack, value in zip(self._array.parameters(), self._weights, strict=True):
                stack.copy_(value)
        if self._array.optimizer is not None:
            self._array.optimizer.put_back(self._states)


def fuse_to_fit(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any] = (),
    seeds: Sequence[int | None] | None = None,
    random: Sequence[list[Any]] | None = None,
    *,
    memory_limit: int | None = None,
    **options: Any,
) -> SplitArray:
    """Train models together as `fuse` does, in as many groups as `memory_limit` (bytes) requires.

    Without a limit all are one group until memory runs out. Other options are those of `fuse`.
    """
    array = fuse(models, optimizers, schedulers, seeds, random, **options)
    return SplitArray(array, memory_limit, **options)


def _models(array: ModelArray) -> list[nn.Module]:
    return [array[place] for place in range(len(array))]


def _numbered(models: Sequence[nn.Module]) -> dict[int, int]:
    return {id(model): place for place, model in enumerate(models)}


def _alike(inputs: Sequence[Any], places: Sequence[int]) -> tuple[int, ...]:
    """Those whose inputs have the shapes of the first one's."""

    def shapes(place: int) -> list[Any]:
        own = tree_leaves([_change_lists(itemgetter(place), one) for one in inputs])
        return [(one.shape, one.dtype) if isinstance(one, torch.Tensor) else None for one in own]

    first = shapes(places[0])
    return tuple(place for place in places if shapes(place) == first)


def _change_lists(change: Callable[[list[Any]], Any], value: Any) -> Any:
    """Change the lists in an argument: they have a value for each model, tuples have parts."""
    if type(value) is tuple:
        return tuple(_change_lists(change, part) for part in value)
    if isinstance(value, Stacked):
        return change(list(value.each()))
    return change(value) if isinstance(value, list) else value


# How many models fit into one array, before any of them trains.
#
# Copies of one model train two steps as arrays of one, two and four. Weights, gradients, optimizer
# states and activations grow with the number of models; a library's workspaces do not. What the
# steps between them show is the straight line, and how far it can be trusted.

_TRIED = (1, 2, 4)  # models
_STEPS = 2  # the first makes the optimizer's state, the second trains with it
_FRAGMENTS = 0.08  # of the memory: what an allocator may be unable to use
_MOST = 4096  # nobody trains more at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFit:
    """The largest array that fits into `memory_bytes`."""

    models: int
    low: int  # at least so many will fit
    high: int  # and at most so many
    fixed_bytes: int  # whatever the number of models
    model_bytes: int  # that each model adds
    memory_bytes: int


def largest_array(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any],
    *inputs: Any,
    memory: int | None = None,
) -> ArrayFit:
    """Find how many such models fit into memory together.

    `loss(model, *inputs)` is one model's; `memory` in bytes is else all that is free.

    The model, its optimizer and torch's random numbers stay as they are.
    """
    device = next(model.parameters()).device
    limit = allocatable_bytes(device) if memory is None else memory
    if limit <= 0:
        raise UsageError(f"memory={limit}: give the bytes that the fused models may take")
    peaks: dict[int, int] = {}
    for count in _TRIED:
        if count > 2 and _line(peaks)[0] + count * _line(peaks)[1] > limit:
            break
        if device.type == "cpu" and torch.autograd._profiler_enabled():
            raise UsageError(
                "the memory of fused models cannot be measured while a profiler records"
            )
        random = states_now()
        train = partial(_train_copies, count, model, optimizer, loss, inputs)
        try:
            peaks[count] = int(meter_on(device)(train)[1])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        finally:
            restore(random)
            gc.collect()
    return fit_line(peaks, limit)


def fit_line(peaks: dict[int, int], limit: int) -> ArrayFit:
    """From peaks by number of models; none or one of them: the next did not fit."""
    if len(peaks) < 2:
        fits, model_bytes = int(bool(peaks) and peaks[1] <= limit), peaks.get(1, 0)
        return ArrayFit(
            models=fits,
            low=fits,
            high=fits,
            fixed_bytes=0,
            model_bytes=model_bytes,
            memory_bytes=limit,
        )

    def fitting(limit: int, fixed: int, slope: int) -> int:
        return min(_MOST, max(0, (limit - fixed) // slope))

    fixed, slope = _line(peaks)
    slopes = _slopes(peaks)
    models = fitting(limit, fixed, slope)
    return ArrayFit(
        models=models,
        low=min(models, fitting(int(limit * (1 - _FRAGMENTS)), fixed, max(slopes))),
        high=max(models, fitting(limit, min(0, fixed), min(slopes))),
        fixed_bytes=max(0, fixed),
        model_bytes=slope,
        memory_bytes=limit,
    )


def _line(peaks: dict[int, int]) -> tuple[int, int]:
    """Bytes without a model, and of each: through the last two."""
    last = max(peaks)
    slope = _slopes(peaks)[-1]
    return peaks[last] - last * slope, slope


def _slopes(peaks: dict[int, int]) -> list[int]:
    counts = sorted(peaks)
    return [max(1, round((peaks[b] - peaks[a]) / (b - a))) for a, b in itertools.pairwise(counts)]


def _train_copies(
    count: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any],
    inputs: Sequence[Any],
) -> None:
    models, optimizers = zip(
        *(copy.deepcopy((model, optimizer)) for _ in range(count)), strict=True
    )
    array = fuse(models, optimizers)
    batches = [
        [one.clone() for _ in range(count)] if isinstance(one, torch.Tensor) else one
        for one in inputs
    ]
    for _ in range(_STEPS):
        losses = array.apply_each(partial(loss, array), *batches)
        array.zero_grad()
        array.backward(losses)
        del losses
        array.step()
