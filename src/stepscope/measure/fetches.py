"""Batches between the data loader and the steps that train on them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from stepscope.measure.step_notes import EXHAUSTED

if TYPE_CHECKING:
    from collections.abc import Iterable

_TOGETHER_NS = 1_000_000  # zipped loaders fetch one after the other; a model runs for longer
_MOST_WAITING = 4096
# Times that a stretch which only looked like evaluation or an epoch's end gives back.
AWAY = ("evaluation", "between_epochs", "epoch_gap", "away_gc", "away_compile")


class LastFetch:
    """The batch that training goes on with, should a backward pass follow.

    Fetches of zipped loaders are one, and so are the creation of an iterator and what it fetches
    first (a loader that looks ahead fetches two batches).
    """

    def __init__(self) -> None:
        self.loaders: set[int] = set()
        self.loader = 0
        self.exhausted = False
        self.duration = 0  # counted as evaluation or as time between epochs so far
        self.last_duration = 0  # of the very last fetch
        self.elements: list[int] = []
        self.at_begin = dict.fromkeys(AWAY, 0)
        self._began = self._ended = 0
        self.created = False
        self._fetches = 0
        self.unsettled = False

    @property
    def has_batch(self) -> bool:
        return bool(self.loaders) and not self.exhausted

    def begin(
        self, loader: int, now: int, spent: dict[str, int], alike: set[int] | None, *, creates: bool
    ) -> None:
        """`alike`: the loaders that are trained on, as far as it is known; None: all of them."""
        if not self._goes_on(loader, now, alike, creates=creates):
            self.forget(spent)
            self.created = creates
            self._fetches = 0
        self.loaders.add(loader)
        self.loader = loader
        self._began = now

    def _goes_on(self, loader: int, now: int, alike: set[int] | None, *, creates: bool) -> bool:
        if not self.has_batch or now - self._ended > _TOGETHER_NS:
            return False
        if loader in self.loaders:
            ahead = 2 if alike is None or loader in alike else 1
            return self.created and not creates and self._fetches < ahead
        return alike is None or (loader in alike and self.loaders <= alike)

    def end(self, now: int, elements: int, *, away: bool) -> None:
        self._ended = now
        self.last_duration = now - self._began
        self.exhausted = elements == EXHAUSTED
        if elements >= 0:
            self._fetches += 1
        self.unsettled = away
        if away:
            self.duration += self.last_duration
            self.elements += [elements] if elements > 0 else []

    def went_away(self, spent: dict[str, int]) -> None:
        """It met the end of the loader: an epoch's end may have begun with it."""
        self._snapshot(spent)
        self.duration = self.last_duration

    def settle(self) -> None:
        """What it took is attributed now."""
        self.duration = 0
        self.elements = []
        self.unsettled = False

    def step_ends(self) -> None:
        """Times of a step that is over stay as they are."""
        begin = self.at_begin
        for name in AWAY:
            begin[name] = 0
        self.duration = 0

    def forget(self, spent: dict[str, int]) -> None:
        """It was not for training."""
        self._snapshot(spent)
        self.loaders = set()
        self.exhausted = False
        self.settle()

    def _snapshot(self, spent: dict[str, int]) -> None:
        begin = self.at_begin
        for name in AWAY:
            begin[name] = spent[name]

    def awaits_training(self, trained: set[int]) -> bool:
        return self.unsettled and self.has_batch and self.loaders <= trained


class FetchedBatches:
    """Elements of the batches that a step consumed.

    Some loaders look ahead: before the first step of an epoch they fetch more batches than before
    each of the others. So many batches wait for the next step, always.
    """

    def __init__(self) -> None:
        self._waiting: deque[int] = deque(maxlen=_MOST_WAITING)
        self._new = 0  # since the last step ended
        self._step = 0  # of this epoch
        self._first: list[int] = []  # the first step's batches
        self._ahead = self._usual = 0
        self._over = False

    def add(self, elements: Iterable[int]) -> None:
        for count in elements:
            self._waiting.append(count)
            self._new += 1

    def epoch_begins(self) -> None:
        self._waiting.clear()
        self._new = self._step = 0
        self._over = False

    def epoch_ends(self) -> None:
        self._over = True

    def consumed(self) -> int:
        """A step has ended: the elements it trained on."""
        self._learn()
        waiting = self._waiting
        keep = 0 if self._over else self._ahead
        count = 0
        while len(waiting) > keep:
            count += waiting.popleft()
        self._new = 0
        self._step += 1
        return count

    def _learn(self) -> None:
        if self._over:
            return
        if self._step == 0:
            self._first = list(self._waiting)
        elif self._step == 1:
            known, self._usual = self._ahead, self._new
            self._ahead = max(0, len(self._first) - self._new)
            if self._ahead and not known:  # the first step was given them too
                self._waiting.extendleft(reversed(self._first[-self._ahead :]))
        elif self._new != self._usual:
            self._ahead = 0
