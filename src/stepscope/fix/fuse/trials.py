"""One trial of a search: a setting, what the program builds with it, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from stepscope.errors import UsageError
from stepscope.fix.fuse.architecture import describe
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
    error: BaseException | None = None  # why it failed

    @property
    def loss(self) -> float:
        """The last one; infinite before the first."""
        return self.losses[-1] if self.losses else float("inf")


class TrialFailedError(Exception):
    """A trial's own data raised, which is the cause; the others can go on without it."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


@dataclass(slots=True)
class StartedTrial:
    """A trial with what it trains."""

    trial: SweptTrial
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    loss: Callable[[Any, Any], Any]
    random: list[Any]  # its stream of random numbers, its first batch drawn
    since: Any = None  # sum of losses since the last report
    counted: int = 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for trials that can train in one array."""
        return describe(self.model), _describe_optimizer(self.optimizer), self.batches.shapes


class Batches:
    """A trial's data, gone through again and again. The first batch is drawn at once: its shapes
    decide who may train together."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._begin()
        self._ahead = [self._draw()]
        leaves, structure = tree_flatten(self._ahead[0])
        shapes = [tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in leaves]
        self.shapes = (str(structure), *shapes)

    def next(self) -> Any:
        return self._ahead.pop() if self._ahead else self._draw()

    def put_back(self, batch: Any) -> None:
        """It will be the next one again."""
        self._ahead.append(batch)

    def position(self) -> dict[str, Any]:
        """Where `skip_to` goes on: how this pass began, how many batches were drawn from it, and
        how many of those nobody has seen yet."""
        return {"random": self._random, "taken": self._taken, "ahead": len(self._ahead)}

    def skip_to(self, position: dict[str, Any]) -> None:
        """The next batch is the one that followed there. torch's random numbers stay."""
        outer = states_now()
        restore(position["random"])
        self._begin()
        seen = position["taken"] - position["ahead"]
        for _ in range(seen):
            self._draw()
        self._ahead = [self._draw() for _ in range(position["ahead"])][::-1]
        restore(outer)

    def _begin(self) -> None:
        self._random = states_now()
        self._iterator: Iterator[Any] = iter(self._data)
        self._taken = 0

    def _draw(self) -> Any:
        batch = next(self._iterator, None)
        if batch is None:
            self._begin()
            batch = next(self._iterator, None)
        if batch is None:
            raise UsageError("build(config) returned data without a batch")
        self._taken += 1
        return batch


def start_trial(build: Build, config: Settings, number: int, seed: int) -> StartedTrial:
    """As the program would alone: seeded, then built. Raises what `build` raises."""
    trial = SweptTrial(number=number, config=config, seed=seed, state="training")
    outer = states_now()
    torch.manual_seed(seed)
    try:
        built = build(config)
        if not isinstance(built, tuple) or len(built) != _PARTS:
            raise UsageError("build(config) must return model, optimizer, data and loss")
        model, optimizer, data, loss = built
        return StartedTrial(trial, model, optimizer, Batches(data), loss, states_now())
    finally:
        restore(outer)


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What must be the same in one array: its kind, groups, and settings that are no numbers."""
    groups = [(len(group["params"]), *_switches(group.items())) for group in optimizer.param_groups]
    return type(optimizer), *groups


def _switches(settings: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    kinds = (bool, str, type(None))
    return [(name, value) for name, value in settings if isinstance(value, kinds)]
