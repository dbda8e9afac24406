"""Train one program with many settings: trials share an array, and leave and join it as they
end and begin.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from stepscope.errors import StepscopeError, UsageError
from stepscope.fix.fuse.architecture import describe
from stepscope.fix.fuse.split_array import ArrayFit, SplitArray, fuse_to_fit, largest_array
from stepscope.fix.random_states import restore, states_now

#     def build(config):                         # what the program does with its settings
#         model = Net(config["width"])
#         optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
#         return model, optimizer, batches(), loss    # loss(model, batch) -> a scalar
#
#     for trial in sweep(build, grid(lr=[1e-3, 3e-4], wd=[0, 0.1]), steps=500, width=16): ...
#
# Trials of one architecture share an array of `width` models. Each is seeded, fed and stepped as it
# would be alone; `stop(trial)` is asked now and then whether one should end early.

_MOST_ON_DEVICE, _MOST_ON_HOST = 64, 8  # models that "auto" trains together; more gain little


def grid(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return every combination of the values, in order."""
    return [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]


def sweep(
    build: Build,
    configs: Iterable[Settings],
    *,
    steps: int,
    width: int | None = 8,
    every: int = 50,
    seed: int = 0,
    stop: Callable[[SweptTrial], bool] = lambda _trial: False,
) -> Iterator[SweptTrial]:
    """Train one model per setting, several at a time, and yield trials as they end.

    `configs` may be endless or wait for results: one is asked for whenever a place is free.
    `width` None: as many at a time as fit into memory.

    A trial whose `build` or data raise ends as "failed", with its error; the others go on. If the
    model or the loss raises, all trials of the array fail.
    """
    if (width is not None and width < 1) or steps < 1:
        raise UsageError("a sweep needs at least one model at a time, and one step")
    queue = _TrialQueue(build, iter(configs), seed)
    while first := queue.next(None):
        array = TrialArray(first)
        try:
            most = width or _largest_width(array)
        except Exception as error:  # of the model or its loss
            yield _failed(array.remove(0), error)
            continue
        while len(array):
            while len(array) < most and (new := queue.next(array.kind)):
                array.add(new)
            yield from queue.take_failed()
            left = min(steps - trial.step for trial in array.trials)
            try:
                array.train(min(every, left))  # so that nobody trains too far
            except StepscopeError:
                raise
            except TrialFailedError as error:
                yield _failed(array.remove(error.place), error.__cause__)
                continue
            except Exception as error:  # of the code that they have in common
                yield from [_failed(array.remove(0), error) for _ in range(len(array))]
                break
            for place in reversed(range(len(array))):
                trial = array.trials[place]
                if trial.step >= steps or stop(trial):
                    trial.state = "finished" if trial.step >= steps else "stopped"
                    yield array.remove(place)
    yield from queue.take_failed()


class _TrialQueue:
    """Start trials when there is a place for them; those of another architecture wait."""

    def __init__(self, build: Build, configs: Iterator[Settings], seed: int) -> None:
        self._build, self._configs, self._seed = build, configs, seed
        self._waiting: deque[StartedTrial] = deque()
        self._failed: list[SweptTrial] = []
        self._numbers = itertools.count()

    def next(self, kind: Any) -> StartedTrial | None:
        """A trial of this kind, or of any for None."""
        for place, started in enumerate(self._waiting):
            if kind is None or started.kind == kind:
                del self._waiting[place]
                return started
        while (config := next(self._configs, None)) is not None:
            number = next(self._numbers)
            try:
                new = start_trial(self._build, config, number, self._seed)
            except UsageError:
                raise
            except Exception as error:
                trial = SweptTrial(number=number, config=config, seed=self._seed)
                self._failed.append(_failed(trial, error))
                continue
            if kind is None or new.kind == kind:
                return new
            self._waiting.append(new)
        return None

    def take_failed(self) -> Iterator[SweptTrial]:
        failed, self._failed = self._failed, []
        yield from failed


def _failed(trial: SweptTrial, error: BaseException | None) -> SweptTrial:
    trial.state, trial.error = "failed", error
    return trial


def _largest_width(array: TrialArray) -> int:
    """Return how many models fit into memory, and no more than gains anything."""
    device = next(array.members[0].model.parameters()).device
    most = _MOST_ON_HOST if device.type == "cpu" else _MOST_ON_DEVICE
    return max(1, min(most, array.fitting().low))


# Trials of one architecture that train together, each as it would alone.


class TrialArray:
    """The first trial brings the architecture; more join and leave as they begin and end."""

    def __init__(self, first: StartedTrial) -> None:
        self.kind = first.kind
        self.members = [first]
        self.array: SplitArray = fuse_to_fit(
            [first.model], [first.optimizer], random=[first.random]
        )

    def __len__(self) -> int:
        return len(self.members)

    @property
    def trials(self) -> list[SweptTrial]:
        return [one.trial for one in self.members]

    def fitting(self, memory: int | None = None) -> ArrayFit:
        """How many trials such as the first one fit."""
        first = self.members[0]
        with self.array.drawing_as(0):
            batch = first.batches.next()
        first.batches.put_back(batch)
        loss, parts = _common_loss(first, [batch])
        return largest_array(first.model, first.optimizer, loss, *parts, memory=memory)

    def add(self, started: StartedTrial) -> None:
        self.array.admit(started.model, started.optimizer, random=started.random)
        self.members.append(started)

    def remove(self, place: int) -> SweptTrial:
        """The trial takes its model with it. The last one ends the array."""
        gone = self.members.pop(place)
        gone.trial.model = self.array.evict(place) if self.members else gone.model
        return gone.trial

    def train(self, steps: int) -> None:
        """So many steps of every trial, then their mean loss. TrialFailedError: nobody has trained
        the step whose data one could not give."""
        for _ in range(steps):
            loss, parts = _common_loss(self.members[0], self._draw())
            losses = self.array.train_step(loss, *parts)
            for one, value in zip(self.members, losses, strict=True):
                one.trial.step += 1
                one.counted += 1
                one.since = value if one.since is None else one.since + value
        for one in self.members:
            one.trial.losses.append(float(one.since) / one.counted)
            one.since, one.counted = None, 0

    def _draw(self) -> list[Any]:
        """Every trial's next batch."""
        batches: list[Any] = []
        for place, one in enumerate(self.members):
            try:
                with self.array.drawing_as(place):
                    batches.append(one.batches.next())
            except Exception as error:
                for drawn, batch in zip(self.members, batches, strict=False):
                    drawn.batches.put_back(batch)
                raise TrialFailedError(place) from error
        return batches

    def checkpoint(self) -> dict[str, Any]:
        """Between two calls of `train`."""
        return {
            "array": self.array.checkpoint(),
            "trials": [
                {
                    "number": one.trial.number,
                    "config": dict(one.trial.config),
                    "seed": one.trial.seed,
                    "step": one.trial.step,
                    "losses": list(one.trial.losses),
                    "batches": one.batches.position(),
                }
                for one in self.members
            ],
        }

    @classmethod
    def from_checkpoint(cls, build: Build, saved: dict[str, Any]) -> TrialArray:
        """Build every trial anew, and put each where it was."""
        members = []
        for one in saved["trials"]:
            started = start_trial(build, one["config"], one["number"], one["seed"])
            started.trial.step, started.trial.losses = one["step"], list(one["losses"])
            started.batches.skip_to(one["batches"])
            members.append(started)
        array = cls(members[0])
        array.members = members
        array.array = fuse_to_fit(
            [one.model for one in members], [one.optimizer for one in members]
        )
        array.array.resume(saved["array"])
        return array


def _common_loss(started: StartedTrial, batches: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A loss of a batch's tensors, and these: one for each model, or once where it is one for all.
    What else is in a batch must be the same for all."""
    flat, structures = zip(*(tree_flatten(batch) for batch in batches), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise UsageError("the batches of trials that train together differ in their structure")

    def loss(model: Any, *parts: Any) -> Any:
        return started.loss(model, tree_unflatten(parts, structures[0]))

    return loss, [_part(own) for own in zip(*flat, strict=True)]


def _part(own: Sequence[Any]) -> Any:
    first = own[0]
    if isinstance(first, torch.Tensor):
        return first if all(one is first for one in own) else list(own)
    if any(one != first for one in own):
        raise UsageError(f"the batches of trials that train together differ in {first!r}")
    return first


# One trial of a search: a setting, what the program builds with it, and how far it is.

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
        # What must be the same in one array: its kind, groups, and settings that are no numbers.
        groups = [
            (len(group["params"]), *_switches(group.items()))
            for group in self.optimizer.param_groups
        ]
        return describe(self.model), (type(self.optimizer), *groups), self.batches.shapes


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
    """Seed and build as the program would alone. Raises what `build` raises."""
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


def _switches(settings: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    kinds = (bool, str, type(None))
    return [(name, value) for name, value in settings if isinstance(value, kinds)]
