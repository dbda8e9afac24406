"""One program with many settings: trials train together, and leave and join as they end and begin.

    def build(config):                         # what the program does with its settings
        model = Net(config["width"])
        optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
        return model, optimizer, batches(), loss    # loss(model, batch) -> a scalar

    for trial in sweep(build, grid(lr=[1e-3, 3e-4], wd=[0, 0.1]), steps=500, width=16): ...

Trials of one architecture share an array of `width` models. Each is seeded, fed and stepped as it
would be alone; `stop(trial)` is asked now and then whether one should end early.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.fix.fuse.architecture import describe
from stepscope.fix.fuse.array import ModelArray, fuse
from stepscope.fix.random_states import restore, states_now

Settings = Mapping[str, Any]
Build = Callable[[Settings], tuple[nn.Module, torch.optim.Optimizer, Iterable[Any], Any]]
_PARTS = 4  # of what build returns


@dataclass(slots=True)
class SweptTrial:
    """One setting: how far it is, and how it does."""

    number: int
    config: Settings
    seed: int = 0
    step: int = 0
    losses: list[float] = field(default_factory=list)  # the mean since the one before
    state: str = "waiting"  # then training, finished, stopped or failed
    model: nn.Module | None = None  # once it has left its array

    @property
    def loss(self) -> float:
        """The last one; infinite before the first."""
        return self.losses[-1] if self.losses else float("inf")


def grid(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination, in order."""
    return [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]


def sweep(
    build: Build,
    configs: Iterable[Settings],
    *,
    steps: int,
    width: int = 8,
    every: int = 50,
    seed: int = 0,
    stop: Callable[[SweptTrial], bool] = lambda _trial: False,
) -> Iterator[SweptTrial]:
    """Trials as they end. `configs` may be endless or wait for results: one is asked for whenever
    a place in an array is free."""
    running = _Sweep(build, iter(configs), steps=steps, width=width, every=every, seed=seed)
    yield from running.run(stop)


@dataclass(slots=True)
class _Started:
    """A trial with what it trains."""

    trial: SweptTrial
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Any]
    loss: Callable[[Any, Any], Any]
    random: list[Any]  # its stream of random numbers after it was built
    since: Any = None  # sum of losses since the last report
    counted: int = 0

    def next_batch(self, data: Iterable[Any]) -> Any:
        """Data that end begin again."""
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(data)
            batch = next(self.batches)
        return batch


class _Sweep:
    def __init__(
        self,
        build: Build,
        configs: Iterator[Settings],
        *,
        steps: int,
        width: int,
        every: int,
        seed: int,
    ) -> None:
        if width < 1 or steps < 1:
            raise UsageError("a sweep needs at least one model at a time, and one step")
        self._build, self._configs, self._seed = build, configs, seed
        self._steps, self._width, self._every = steps, width, every
        self._data: dict[int, Iterable[Any]] = {}
        self._waiting: deque[_Started] = deque()  # of another architecture than the array's
        self._numbers = itertools.count()

    def run(self, stop: Callable[[SweptTrial], bool]) -> Iterator[SweptTrial]:
        while first := self._next(None):
            yield from self._train_like(first, stop)

    def _train_like(
        self, first: _Started, stop: Callable[[SweptTrial], bool]
    ) -> Iterator[SweptTrial]:
        """All trials of the first one's architecture, until none is left."""
        kind = describe(first.model)
        members = [first]
        array = fuse([first.model], [first.optimizer], random=[first.random])
        while members:
            while len(members) < self._width and (new := self._next(kind)):
                array.admit(new.model, new.optimizer, random=new.random)
                members.append(new)
            self._train(array, members)
            for place in reversed(range(len(members))):
                trial = members[place].trial
                if trial.step >= self._steps or stop(trial):
                    trial.state = "finished" if trial.step >= self._steps else "stopped"
                    gone = members.pop(place)
                    trial.model = array.evict(place) if members else gone.model
                    self._data.pop(trial.number, None)
                    yield trial

    def _train(self, array: ModelArray, members: Sequence[_Started]) -> None:
        """A few steps, the same number for all, so that nobody trains too far."""
        left = min(self._steps - one.trial.step for one in members)
        for _ in range(min(self._every, left)):
            batches = [self._batch_of(array, place, one) for place, one in enumerate(members)]
            losses = array.apply_each(
                lambda *parts: members[0].loss(array, _batch(parts)), *_parts(batches)
            )
            array.zero_grad()
            array.backward(losses)
            array.step()
            for one, loss in zip(members, losses.each(), strict=True):
                one.trial.step += 1
                one.counted += 1
                one.since = loss.detach() if one.since is None else one.since + loss.detach()
        for one in members:
            one.trial.losses.append(float(one.since) / one.counted)
            one.since, one.counted = None, 0

    def _batch_of(self, array: ModelArray, place: int, started: _Started) -> Any:
        with array.drawing_as(place):
            return started.next_batch(self._data[started.trial.number])

    def _next(self, kind: Any) -> _Started | None:
        """A trial of this architecture, or of any; those of another wait for their own array."""
        for place, started in enumerate(self._waiting):
            if kind is None or describe(started.model) == kind:
                del self._waiting[place]
                return started
        while (config := next(self._configs, None)) is not None:
            started = self._start(config)
            if kind is None or describe(started.model) == kind:
                return started
            self._waiting.append(started)
        return None

    def _start(self, config: Settings) -> _Started:
        """As the program would alone: seeded, then built."""
        number = next(self._numbers)
        trial = SweptTrial(number=number, config=config, seed=self._seed, state="training")
        outer = states_now()
        torch.manual_seed(self._seed)
        try:
            built = self._build(config)
            if not isinstance(built, tuple) or len(built) != _PARTS:
                raise UsageError("build(config) must return model, optimizer, data and loss")
            model, optimizer, data, loss = built
            self._data[number] = data
            return _Started(trial, model, optimizer, iter(data), loss, states_now())
        finally:
            restore(outer)


def _parts(batches: Sequence[Any]) -> list[Any]:
    """Every model's batch, part by part; a part that is one tensor for all is given once."""
    tuples = [batch if isinstance(batch, tuple | list) else (batch,) for batch in batches]
    parts = []
    for own in zip(*tuples, strict=True):
        shared = all(one is own[0] for one in own) or not isinstance(own[0], torch.Tensor)
        parts.append(own[0] if shared else list(own))
    return parts


def _batch(parts: Sequence[Any]) -> Any:
    return tuple(parts) if len(parts) > 1 else parts[0]
