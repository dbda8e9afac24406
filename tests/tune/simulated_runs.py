"""Trials without processes: steps and losses are made up from what each remedy is said to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stepscope.changes.change import Application, Change, Code, Effect
from stepscope.fix.declaration import Fix
from stepscope.fix.named_changes import ChosenChange
from stepscope.fix.proposal import Proposal
from stepscope.records.script_facts import ScriptFacts
from stepscope.ui.tune.contenders import Configuration, Contender, TrialRules
from stepscope.ui.tune.plan import FinishedTrial, Journal, PlannedRemedy
from stepscope.ui.tune.search import Search
from stepscope.ui.tune.trials import TrialBench, TrialLength, TrialRun
from stepscope.verify.trials import Loss, RankPeak, RankTrial

STEPS = 55
TOOK_S = 10.0


@dataclass
class SimulatedCommand:
    """`factors`: what each remedy does to the step; `together`: what sets do beyond that."""

    factors: dict[str, float]
    together: dict[frozenset[str], float] = field(default_factory=dict)
    crashes: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()  # remedies that find nothing to change
    bytes: dict[str, int] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)  # seconds that each takes to start
    off: dict[str, float] = field(default_factory=dict)  # share by which losses are off
    redrawn: frozenset[str] = frozenset()  # remedies that draw other random numbers
    chaos: float = 0.0  # share by which weights that are nudged move the losses
    unseeded: bool = False  # every run draws other random numbers
    seed: int = 0
    starts: float = 0.003  # deviation from start to start
    asked: list[Configuration] = field(default_factory=list)

    def run(self, number: int, remedies: Sequence[str], *, steps: int, limit_s: float) -> TrialRun:
        del steps
        self.asked.append(tuple(remedies))
        trial = self._make(number, remedies)
        if trial.took_s > limit_s:
            return replace(trial, took_s=limit_s, failed="it was ended", was_ended=True)
        return trial

    def read(self, finished: FinishedTrial) -> TrialRun:
        return self._make(finished.number, finished.remedies)

    def _make(self, number: int, remedies: Sequence[str]) -> TrialRun:
        known = {
            "number": number,
            "remedies": tuple(remedies),
            "folder": f"{number:04d}",
            "took_s": TOOK_S + sum(self.slow.get(name, 0.0) for name in remedies),
        }
        if broken := self.crashes.intersection(remedies):
            return TrialRun(**known, failed=f"exit code 1 with {min(broken)}", output=("boom",))
        return TrialRun(
            **known,
            step_ms=self._steps(number, remedies),
            ranks={
                0: RankTrial(
                    losses=self._losses(number, remedies),
                    peak=RankPeak(host=1000 + sum(self.bytes.get(name, 0) for name in remedies)),
                )
            },
            unapplied=dict.fromkeys(self.idle.intersection(remedies), "it found nothing to change"),
            facts=ScriptFacts(),
        )

    def _steps(self, number: int, remedies: Sequence[str]) -> np.ndarray:
        random = np.random.default_rng((self.seed, number))
        step = 100.0 * np.prod([self.factors.get(name, 1.0) for name in remedies])
        for names, factor in self.together.items():
            step *= factor if names <= set(remedies) else 1.0
        step *= np.exp(random.normal(0, self.starts))
        return step * np.exp(random.normal(0, 0.01, STEPS))

    def _losses(self, number: int, remedies: Sequence[str]) -> tuple[Loss, ...]:
        """A falling curve with the batches' noise, the same in every run of a seeded script."""
        drawn = number if self.unseeded else len(self.redrawn.intersection(remedies))
        noise = np.random.default_rng((7, drawn)).normal(0, 0.05, STEPS)
        off = 1 + sum(self.off.get(name, 0.0) for name in remedies)
        if any(name.startswith("nudged-weights") for name in remedies):
            off += self.chaos * (-1) ** number
        curve = (np.exp(-np.arange(STEPS) / 40) + 1 + noise) * off
        return tuple(Loss(step, float(value).hex()) for step, value in enumerate(curve))


class CrashesTogether(SimulatedCommand):
    """Remedy b runs alone, and beside no other."""

    def run(self, number: int, remedies: Sequence[str], *, steps: int, limit_s: float) -> TrialRun:
        self.crashes = frozenset("b") if len(remedies) > 1 else frozenset()
        return super().run(number, remedies, steps=steps, limit_s=limit_s)


def made_up_fix(
    name: str,
    *,
    family: str = "",
    effect: Effect = Effect.BIT_IDENTICAL,
    after: frozenset[str] = frozenset(),
    needs: str | None = None,
) -> ChosenChange:
    """`needs`: why it does not fit."""
    identifier, _, value = name.partition("=")
    application = Application(Code("made.up:FIX"), effect, family=family, after=after)
    fix = Fix(
        fits=lambda _facts, _value: needs,
        patch=lambda _script, _value: Proposal(),
        apply=lambda _training, _value: None,
    )
    return ChosenChange(Change(identifier, application=application), fix, value)


def contenders(*fixes: ChosenChange, hopeless: Sequence[str] = ()) -> list[Contender]:
    return [
        Contender(planned=PlannedRemedy(remedy=str(fix), hopeless=str(fix) in hopeless), chosen=fix)
        for fix in fixes
    ]


def searched(
    command: SimulatedCommand,
    fixes: Sequence[Contender],
    *,
    budget_s: float = 10_000.0,
    limit_s: float = math.inf,
    rules: TrialRules | None = None,
    late: Sequence[ChosenChange] = (),
    journal: Journal | None = None,
    together: Configuration = (),
    captured_ms: float | None = 100.0,
) -> Search:
    """A whole search, done."""
    length = TrialLength(asked=STEPS)
    bench = TrialBench(command, length=length, budget_s=budget_s, limit_s=limit_s, journal=journal)
    search = Search(
        fixes,
        bench,
        rules or TrialRules(),
        late=late,
        together=together,
        captured_ms=captured_ms,
    )
    search.run()
    return search
