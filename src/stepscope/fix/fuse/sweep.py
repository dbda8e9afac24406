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
from typing import TYPE_CHECKING, Any

from stepscope.errors import StepscopeError, UsageError
from stepscope.fix.fuse.trial_array import TrialArray
from stepscope.fix.fuse.trials import SweptTrial, TrialFailedError, start_trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from stepscope.fix.fuse.trials import Build, Settings, StartedTrial

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
    running = _Sweep(build, iter(configs), steps=steps, width=width, every=every, seed=seed)
    yield from running.run(stop)


class _Sweep:
    def __init__(
        self,
        build: Build,
        configs: Iterator[Settings],
        *,
        steps: int,
        width: int | None,
        every: int,
        seed: int,
    ) -> None:
        if (width is not None and width < 1) or steps < 1:
            raise UsageError("a sweep needs at least one model at a time, and one step")
        self._build, self._configs, self._seed = build, configs, seed
        self._steps, self._width, self._every = steps, width, every
        self._waiting: deque[StartedTrial] = deque()  # of another architecture than the array's
        self._failed: list[SweptTrial] = []
        self._numbers = itertools.count()

    def run(self, stop: Callable[[SweptTrial], bool]) -> Iterator[SweptTrial]:
        while first := self._next(None):
            yield from self._train_like(first, stop)
        yield from self._take_failed()

    def _train_like(
        self, first: StartedTrial, stop: Callable[[SweptTrial], bool]
    ) -> Iterator[SweptTrial]:
        """All trials of the first one's architecture, until none is left."""
        array = TrialArray(first)
        try:
            width = self._width or _largest_width(array)
        except Exception as error:  # of the model or its loss
            yield _failed(array.remove(0), error)
            return
        while len(array):
            while len(array) < width and (new := self._next(array.kind)):
                array.add(new)
            yield from self._take_failed()
            left = min(self._steps - trial.step for trial in array.trials)
            try:
                array.train(min(self._every, left))  # so that nobody trains too far
            except StepscopeError:
                raise
            except TrialFailedError as error:
                yield _failed(array.remove(error.place), error.__cause__)
                continue
            except Exception as error:  # of the code that they have in common
                yield from [_failed(array.remove(0), error) for _ in range(len(array))]
                return
            for place in reversed(range(len(array))):
                trial = array.trials[place]
                if trial.step >= self._steps or stop(trial):
                    trial.state = "finished" if trial.step >= self._steps else "stopped"
                    yield array.remove(place)

    def _next(self, kind: Any) -> StartedTrial | None:
        """A trial of this kind, or of any; those of another wait for their own array."""
        for place, started in enumerate(self._waiting):
            if kind is None or started.kind == kind:
                del self._waiting[place]
                return started
        while (config := next(self._configs, None)) is not None:
            new = self._start(config)
            if new is not None and (kind is None or new.kind == kind):
                return new
            if new is not None:
                self._waiting.append(new)
        return None

    def _start(self, config: Settings) -> StartedTrial | None:
        number = next(self._numbers)
        try:
            return start_trial(self._build, config, number, self._seed)
        except UsageError:
            raise
        except Exception as error:
            trial = SweptTrial(number=number, config=config, seed=self._seed)
            self._failed.append(_failed(trial, error))
            return None

    def _take_failed(self) -> Iterator[SweptTrial]:
        failed, self._failed = self._failed, []
        yield from failed


def _failed(trial: SweptTrial, error: BaseException | None) -> SweptTrial:
    trial.state, trial.error = "failed", error
    return trial


def _largest_width(array: TrialArray) -> int:
    """By memory, and not more than gains anything."""
    device = next(array.members[0].model.parameters()).device
    most = _MOST_ON_HOST if device.type == "cpu" else _MOST_ON_DEVICE
    return max(1, min(most, array.fitting().low))
