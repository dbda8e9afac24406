"""Every step's times from notes: each nanosecond of the training thread belongs to one phase.

data (inside the data loader), forward (from a batch's arrival to the start of backward), backward
(inside autograd), optimizer (inside optimizer steps), evaluation (from `eval()` to `train()`, or
while batches are fetched without gradients), checkpoint (inside a save), gc (inside Python's
garbage collector), compile (inside torch.compile), between_epochs (from the end of a loader that
is trained on to its next beginning, without evaluation and checkpoints), other (the rest). They add
up to the step. Collections and compilation during evaluation, or between epochs, belong to that.

Whether a stretch was evaluation, or time between epochs, is known only when training goes on. Until
then the clock remembers the last batch that was fetched: if a backward pass follows, training went
on with that batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.measure.fetches import AWAY, FetchedBatches, LastFetch
from stepscope.measure.step_notes import (
    AGAIN,
    ENDED,
    ENTER,
    EXHAUSTED,
    FETCH,
    FETCHED,
    GRAPHS,
    LEAVE,
    MODE,
    PERHAPS,
    Ended,
    Fetch,
    Note,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PHASES = ("data", "forward", "backward", "optimizer", "other")
RARE_PHASES = ("evaluation", "checkpoint", "gc", "compile", "between_epochs")
COUNTS = ("epoch_gap", "elements", "graphs")  # next to the phases, no part of the wall time
_TRAINING = ("backward", "optimizer")
# Counted as evaluation while it goes on; as themselves if that turns out to be training.
_INSIDE = ("gc", "compile")

Spent = dict[str, int]
_NOTHING: Spent = dict.fromkeys((*PHASES, *RARE_PHASES, *COUNTS, *AWAY), 0)


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

    @property
    def unfinished(self) -> Spent:
        """What ran since the last step ended."""
        return self._spent

    def read(self, notes: Iterable[Note]) -> Iterator[tuple[Ended, int, Spent]]:
        """Every step that ended, its wall time and its phases' times, which add up to it.

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
            else:
                wall, spent = now - self._began, self._spent
                self._began = now
                self._spent = _NOTHING.copy()
                self._last.step_ends()
                if what == ENDED:
                    spent["elements"] = self._batches.consumed()
                    yield from self._split(it, wall, spent)
                self._perhaps = None

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
            self._meet_end()

    def _meet_end(self) -> None:
        """A loader is exhausted: an epoch is over, or an evaluation that nobody announced."""
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
