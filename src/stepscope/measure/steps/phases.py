"""Attribute each nanosecond of the training thread to one phase, from the notes that the
training thread takes. Runs in the writer's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from operator import sub
from typing import Any, NamedTuple

# The training thread only notes events with their times. The writer's thread attributes the time,
# many steps at once. Between two notes the training evicts the processor's caches, so a line of
# Python costs several times as much there as in a loop of its own.

# A phase begins (ENTER) and ends (LEAVE). A step ended (ENDED), or perhaps did (PERHAPS). The time
# since the last step's end was ours (AGAIN). A module enters training or evaluation mode (MODE). A
# data loader creates its iterator or fetches a batch (FETCH) and is done (FETCHED). Dynamo compiled
# some graphs (GRAPHS). A stretch of steps ended of which only the ends were noted (STRETCH).
ENTER, LEAVE, ENDED, AGAIN, PERHAPS, MODE, FETCH, FETCHED, GRAPHS, STRETCH = range(10)

# An event, its time by the performance counter, and its subject: a phase, the step that ended, a
# fetch, the elements of a batch, a mode, a number of graphs, a stretch.
Note = tuple[int, int, Any]

# Which loader fetches, whether it creates its iterator, and whether gradients are on.
Fetch = tuple[int, bool, bool]
# What FETCHED says when no batch came.
EXHAUSTED, NO_BATCH = -1, -2

# What only the training thread knows about a step that ends: its number, the wall clock, whether
# the profiler ran, the device's events around it, marks of what is unusual, whether the first
# PERHAPS since the previous step's end also ended a step, and what the system says (step_times.py).
Ended = tuple[int, int, bool, Any, tuple[str, ...], bool, Any]


class Stretch(NamedTuple):
    """Steps of which only the ends were noted; once they are read, wall times stand for ends."""

    first: int
    began: int
    ends: list[int]
    unix_ns: int  # at the end of the last
    events: Any  # the device's, around them
    reading: Any  # what the system says at their end (step_times.py)
    noted: bool  # whether the step that follows is, from its beginning


# Batches between the data loader and the steps that train on them.

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


# Every step's times from notes: each nanosecond of the training thread belongs to one phase.
#
# data (inside the data loader), forward (from a batch's arrival to the start of backward), backward
# (inside autograd), optimizer (inside optimizer steps), evaluation (from `eval()` to `train()`, or
# while batches are fetched without gradients), checkpoint (inside a save), gc (inside Python's
# garbage collector), compile (inside torch.compile), between_epochs (from the end of a loader that
# is trained on to its next beginning, without evaluation and checkpoints), other (the rest). They
# add up to the step. Collections and compilation during evaluation, or between epochs, belong to
# that. Short steps are not all noted (pace.py): what was not is `unnoted`.
#
# Whether a stretch was evaluation, or time between epochs, is known only when training goes on.
# Until then the clock remembers the last batch that was fetched: if a backward pass follows,
# training went on with that batch.

PHASES = ("data", "forward", "backward", "optimizer", "other")
RARE_PHASES = ("evaluation", "checkpoint", "gc", "compile", "between_epochs")
UNNOTED = "unnoted"
COUNTS = ("epoch_gap", "elements", "graphs")  # next to the phases, no part of the wall time
_TRAINING = ("backward", "optimizer")
# Counted as evaluation while it goes on; as themselves if that turns out to be training.
_INSIDE = ("gc", "compile")

Spent = dict[str, int]
_NOTHING: Spent = dict.fromkeys((*PHASES, *RARE_PHASES, UNNOTED, *COUNTS, *AWAY), 0)


class StepClock:
    """Attributes time to the innermost phase."""

    def __init__(self, began_ns: int = 0) -> None:
        self._began = self._since = began_ns
        self._spent = _NOTHING.copy()
        self._stack = ["other"]
        self._sees_data = False
        self.trained: set[int] = set()  # loaders whose batches are trained on
        self._batches = FetchedBatches()
        self._last = LastFetch()
        self._evaluating = False
        self._unasked = 0  # the loader that shows evaluation, where nobody calls eval()
        self._between = False  # two epochs
        self._epoch_over = False  # the loader is, but batches are still trained on
        self._perhaps: tuple[int, int, Spent] | None = None
        self._base = "other"  # what follows a stretch

    @property
    def unfinished(self) -> Spent:
        """What ran since the last step ended."""
        return self._spent

    @property
    def phase(self) -> str:
        """What the notes so far say that runs now."""
        stack = self._stack
        for rare in ("checkpoint", "compile"):
            if rare in stack:
                return rare
        if self._evaluating:
            return "evaluation"
        return "between_epochs" if self._between else stack[-1]

    def read(self, notes: Iterable[Note]) -> Iterator[tuple[Ended, int, Spent] | Stretch]:
        """Every step that ended, its wall time and its phases' times, which add up to it; and
        stretches, with wall times for ends.

        The end of a phase that never began (a hook added in the middle) changes nothing. AGAIN says
        that the time since the last step's end was ours (a window opened), not the next step's.
        """
        for what, at, it in notes:
            now = at if at > self._since else self._since
            if self._evaluating or self._between:
                self._spend_away(now - self._since, what)
            elif what != AGAIN:
                self._spent[self._stack[-1]] += now - self._since
            self._since = now
            if what == ENTER:
                self._enter(it)
            elif what == LEAVE:
                self._leave(it)
            elif what == FETCH:
                self._fetch(it)
            elif what == FETCHED:
                self._fetched(it)
            elif what == MODE:
                self._change_mode(training=it)
            elif what == GRAPHS:
                self._spent["graphs"] += it
            elif what == PERHAPS:
                self._perhaps = self._perhaps or (it, now - self._began, dict(self._spent))
            elif what == STRETCH:
                yield from self._pass_over(it, now)
            else:
                yield from self._end(it if what == ENDED else None, now)

    def _end(self, ended: Ended | None, now: int) -> Iterator[tuple[Ended, int, Spent]]:
        """A step, or what was ours between two."""
        wall, spent = now - self._began, self._spent
        self._began = now
        self._spent = _NOTHING.copy()
        self._last.step_ends()
        if self._stack[0] == UNNOTED:
            self._stack[0] = self._base
        if ended is not None:
            spent["elements"] = self._batches.consumed()
            yield from self._split(ended, wall, spent)
        self._perhaps = None

    def _pass_over(self, stretch: Stretch, now: int) -> Iterator[Stretch]:
        """Only the ends of these steps were noted. What follows begins a step now, or goes on in
        one whose beginning was not noted either."""
        began = stretch.began
        if stretch.ends:
            yield stretch._replace(ends=list(map(sub, stretch.ends, [began, *stretch.ends])))
            began = stretch.ends[-1]
        self._spent = _NOTHING.copy()
        self._last.step_ends()
        self._perhaps = None
        if stretch.noted:
            self._began = now
            return
        self._began = began
        if self._stack[0] != UNNOTED:
            self._base, self._stack[0] = self._stack[0], UNNOTED
        self._spent[UNNOTED] = now - began

    def _spend_away(self, duration: int, what: int) -> None:
        if what == AGAIN:
            return
        top = self._stack[-1]
        if top in _INSIDE:
            self._spent[f"away_{top}"] += duration
        if top != "checkpoint":
            top = "evaluation" if self._evaluating else "between_epochs"
        self._spent[top] += duration
        if self._between:
            self._spent["epoch_gap"] += duration

    def _is_away(self) -> bool:
        """Whether something other than training seems to go on."""
        return self._evaluating or self._between

    def _enter(self, phase: str) -> None:
        if phase in _TRAINING:
            self._train()
        elif phase == "checkpoint":
            if self._stack[-1] == "data":
                return  # a dataset saves what it has prepared
            self._between |= self._epoch_over
        self._stack.append(phase)

    def _leave(self, phase: str) -> None:
        stack = self._stack
        if len(stack) > 1 and stack[-1] == phase:
            stack.pop()
        if len(stack) == 1 and phase not in RARE_PHASES:
            stack[0] = self._after(phase)

    def _train(self) -> None:
        """A backward pass or an optimizer's step: the last batch fetched is trained on."""
        last = self._last
        if self._is_away():
            self._give_back()
            # A loader that looks ahead meets its end while batches of its are still to come.
            self._epoch_over = (self._epoch_over or self._between) and not last.has_batch
            self._evaluating = self._between = False
            self._unasked = 0
        if last.loader not in self.trained:
            self.trained |= last.loaders

    def _give_back(self) -> None:
        """What ran since the last fetch began was training, not what it looked like."""
        last, spent = self._last, self._spent
        away = {name: spent[name] - ns for name, ns in last.at_begin.items()}
        for name, ns in away.items():
            spent[name] -= ns
        left = away["evaluation"] + away["between_epochs"]
        for name in _INSIDE:
            spent[name] += away[f"away_{name}"]
            left -= away[f"away_{name}"]
        data = min(last.duration, left)
        spent["data"] += data
        spent["forward"] += left - data
        if last.created and last.unsettled:
            self._batches.epoch_begins()
        self._batches.add(last.elements)
        if data and len(self._stack) == 1:
            self._stack[0] = self._after("data")
        last.settle()

    def _fetch(self, fetch: Fetch) -> None:
        loader, creates, gradients = fetch
        outermost = self._stack[-1] != "data"
        self._stack.append("data")
        if not outermost:
            return
        trained = loader in self.trained
        if trained and (self._unasked or not self._evaluating):
            self._between = self._evaluating = self._epoch_over = False
            self._unasked = 0
        elif not trained:
            self._between |= self._epoch_over
            if not (self._evaluating or gradients) and self.trained:
                self._evaluating, self._unasked = True, loader
        if creates and not self._is_away():
            self._batches.epoch_begins()
        # While training goes on, all loaders are trained on.
        alike = self.trained if self._is_away() else None
        self._last.begin(loader, self._since, self._spent, alike, creates=creates)

    def _fetched(self, elements: int) -> None:
        stack = self._stack
        if len(stack) == 1 or stack[-1] != "data":
            return
        stack.pop()
        if stack[-1] == "data":
            return
        away = self._is_away()
        self._last.end(self._since, elements, away=away)
        if elements > 0 and not away:
            self._batches.add([elements])
        if len(stack) == 1 and not away:
            stack[0] = "other" if elements == EXHAUSTED else self._after("data")
        if elements == EXHAUSTED:
            # A loader is exhausted: an epoch is over, or an evaluation that nobody announced.
            last, spent = self._last, self._spent
            if last.loader in self.trained and not self._evaluating:
                self._batches.epoch_ends()
                self._between = True
                last.went_away(spent)
                waited = min(last.last_duration, spent["data"])  # for no batch
                spent["data"] -= waited
                spent["between_epochs"] += waited
                spent["epoch_gap"] += waited
            elif last.loader == self._unasked:
                self._evaluating = False
                self._unasked = 0
                last.forget(spent)

    def _change_mode(self, *, training: bool) -> None:
        if self._stack[-1] in _TRAINING:
            return  # a part of the model that backward runs again
        if not training:
            self._evaluating = True
            self._unasked = 0
            self._between |= self._epoch_over
        elif self._evaluating:
            self._end_evaluation()

    def _end_evaluation(self) -> None:
        """`train()` was called. Some scripts call it after they fetched a batch to train on."""
        last = self._last
        if last.awaits_training(self.trained) and not self._unasked:
            self._give_back()
            self._between = self._epoch_over = False
        else:
            self._epoch_over |= last.exhausted and last.loader in self.trained
            last.forget(self._spent)
        self._evaluating = False
        self._unasked = 0

    def _split(self, ended: Ended, wall: int, spent: Spent) -> Iterator[tuple[Ended, int, Spent]]:
        """One step, or two when the first was not recognised as one at its end."""
        number, _, window, _, _, two, _ = ended
        if two and self._perhaps is not None:
            unix_ns, until, before = self._perhaps
            yield (number - 1, unix_ns, window, None, (), False, None), until, before
            wall -= until
            spent = {phase: spent[phase] - before[phase] for phase in spent}
        yield ended, wall, spent

    def _after(self, phase: str) -> str:
        """The phase that follows this one: forward after a batch, "other" after the rest.

        In a script without a data loader everything outside backward and the optimizer counts as
        forward.
        """
        self._sees_data |= phase == "data"
        return "forward" if phase == "data" or not self._sees_data else "other"
