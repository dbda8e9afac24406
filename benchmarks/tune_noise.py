"""Same against same: how often a tune in which nothing helps keeps something all the same.

python benchmarks/tune_noise.py simulate [--tunes 400]      made-up machines, 1 to 25 candidates
python benchmarks/tune_noise.py power [--tunes 200]         a true gain: kept, after how many pairs
python benchmarks/tune_noise.py collect FILE [--starts 60]  real step lists of a small CPU script
python benchmarks/tune_noise.py resample FILE... [--tunes 400]  tunes made of such lists
python benchmarks/tune_noise.py real 10 [--budget 10m]      real tunes where nothing helps
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from process import environment
from stepscope.changes.change import Application, Change, Code, Effect
from stepscope.fix.declaration import Fix
from stepscope.fix.named_changes import ChosenChange
from stepscope.fix.proposal import Proposal
from stepscope.ui.tune.contenders import Contender, TrialRules
from stepscope.ui.tune.plan import FinishedTrial, PlannedRemedy
from stepscope.ui.tune.search import Search
from stepscope.ui.tune.trials import TrialBench, TrialLength, TrialRun
from stepscope.verify.runs import read_step_list
from stepscope.verify.steady import steady_steps, without_pauses
from stepscope.verify.trials import Loss, RankTrial

Draw = Callable[[tuple[str, ...], int], Sequence[float]]

STEPS = 60
COUNTS = (1, 5, 25)  # candidates
_LOSSES = tuple(Loss(step, (1.0).hex()) for step in range(20))
_SCRIPT = Path(__file__).parent / "workloads" / "timed_steps.py"
_HEALTHY = Path(__file__).parent / "workloads" / "healthy.py"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Steps as a machine with such faults would measure them. Shares are of the step."""

    start: float = 0.01  # deviation from start to start
    step: float = 0.03  # deviation from step to step
    drift: float = 0.0  # over 100 trials
    wander: float = 0.0  # deviation of the pace from trial to trial that adds up
    slow_starts: float = 0.0  # share of starts that are slower
    slow_by: float = 1.1  # times
    hiccups: float = 0.0  # share of trials with a pause of 300 ms
    stall_every: int = 0  # steps, each stall as long as three steps
    restless: float = 0.0  # deviation from start to start of candidates, where it is their own
    calm: float = 0.0  # the same of everything with the remedy "calms", where it is its own
    gains: dict[str, float] = field(default_factory=dict)  # by remedy

    def draw(self, seed: int) -> Draw:
        rng = np.random.default_rng(seed)
        pace = [0.0]

        def trial(remedies: tuple[str, ...], number: int) -> Sequence[float]:
            pace[0] += rng.normal(0, self.wander) if self.wander else 0.0
            level = 10.0 * float(np.prod([1 - self.gains.get(name, 0.0) for name in remedies]))
            start = (self.restless if remedies else 0.0) or self.start
            start = (self.calm if "calms" in remedies else 0.0) or start
            level *= np.exp(rng.normal(0, start) + self.drift * number / 100 + pace[0])
            level *= self.slow_by if rng.random() < self.slow_starts else 1.0
            steps = level * np.exp(rng.normal(0, self.step, STEPS))
            steps[0] *= 30
            if self.stall_every:
                first = int(rng.integers(self.stall_every))
                steps[first :: self.stall_every] += 3 * level
            if rng.random() < self.hiccups:
                steps[int(rng.integers(STEPS))] += 300.0
            return steps.tolist()

        return trial


MACHINES = {
    "starts 0.2%": Machine(start=0.002, step=0.01),
    "starts 1%": Machine(),
    "starts 3%": Machine(start=0.03),
    "starts 5%, steps 10%": Machine(start=0.05, step=0.1),
    "drifts 10%": Machine(drift=0.1),
    "wanders": Machine(wander=0.01),
    "1 start of 10 slow": Machine(slow_starts=0.1),
    "1 start of 10 twice as slow": Machine(slow_starts=0.1, slow_by=2.0),
    "hiccups": Machine(hiccups=0.3),
    "candidates less even": Machine(start=0.005, restless=0.03),
    "stalls": Machine(stall_every=7, start=0.005),
}
CALMED = {"one remedy calms": Machine(start=0.06, calm=0.005, gains={"calms": 0.5})}


@dataclass(frozen=True, kw_only=True)
class MadeUpCommand:
    """Stands in for the command: trials take no time, and losses are always the same."""

    draw: Draw

    def run(self, number: int, remedies: Sequence[str], *, steps: int, limit_s: float) -> TrialRun:
        del steps, limit_s
        return TrialRun(
            number=number,
            remedies=tuple(remedies),
            folder=f"{number:04d}",
            took_s=1.0,
            step_ms=steady_steps(self.draw(tuple(remedies), number)),
            ranks={0: RankTrial(losses=_LOSSES)},
        )

    def read(self, finished: FinishedTrial) -> TrialRun:
        raise NotImplementedError(f"nothing is resumed: {finished.number}")


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a search came to."""

    kept: tuple[str, ...]
    pairs: dict[str, int]  # of each remedy that was put to the test
    trials: int


def tune(draw: Draw, names: Sequence[str], together: tuple[str, ...] = ()) -> Tuned:
    """A whole search of `stepscope tune`, without processes; `together` are tried at once first."""
    contenders = [
        Contender(planned=PlannedRemedy(remedy=name), chosen=_made_up_change(name))
        for name in names
    ]
    length = TrialLength(asked=STEPS)
    bench = TrialBench(MadeUpCommand(draw=draw), length=length, budget_s=1e9)
    captured_ms = float(without_pauses(steady_steps(draw((), 0))).mean())
    search = Search(contenders, bench, TrialRules(), together=together, captured_ms=captured_ms)
    search.run()
    pairs = {
        contender.name: len(tests[-1].pairs)
        for contender in search.contenders
        if (tests := search.tests_of(contender))
    }
    return Tuned(kept=search.kept, pairs=pairs, trials=len(bench.trials))


def _made_up_change(name: str) -> ChosenChange:
    application = Application(Code("benchmarks.tune_noise:FIX"), Effect.BIT_IDENTICAL)
    fix = Fix(fits=lambda *_: None, patch=lambda *_: Proposal(), apply=lambda *_: None)
    return ChosenChange(Change(name, application=application), fix)


def false_keeps(
    draw: Callable[[int], Draw], candidates: int, tunes: int, *, at_once: int = 0
) -> tuple[int, float]:
    """Tunes that keep something, and trials per tune; `at_once` are predicted to help together."""
    names = [f"nothing-{place}" for place in range(candidates)]
    done = [tune(draw(seed), names, tuple(names[:at_once])) for seed in range(tunes)]
    return sum(bool(one.kept) for one in done), float(np.mean([one.trials for one in done]))


def simulate(tunes: int) -> None:
    print(f"of 100 tunes in which nothing helps, so many keep nothing ({tunes} tunes each; trials)")
    heads = [*map(str, COUNTS), f"{COUNTS[-1]}, 3 at once"]
    print(f"{'machine':24}" + "".join(f"{head:>16}" for head in heads))
    for name, machine in MACHINES.items():
        cells = []
        for count, at_once in (*((count, 0) for count in COUNTS), (COUNTS[-1], 3)):
            keeps, trials = false_keeps(machine.draw, count, tunes, at_once=at_once)
            cells.append(f"{100 - 100 * keeps / tunes:.1f} ({trials:.0f})")
        print(f"{name:24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def power(tunes: int) -> None:
    print(
        "one of ten candidates has a true gain: kept in so many of 100 tunes, after so many pairs"
    )
    print(f"{'machine':24}" + "".join(f"{gain:>16.0%}" for gain in (0.01, 0.03, 0.05, 0.3)))
    for name, machine in (MACHINES | CALMED).items():
        cells = []
        for gain in (0.01, 0.03, 0.05, 0.3):
            helps = Machine(**{**vars(machine), "gains": {**machine.gains, "helps": gain}})
            names = [*(f"nothing-{place}" for place in range(9)), *machine.gains, "helps"]
            done = [tune(helps.draw(seed), names) for seed in range(tunes)]
            pairs = [one.pairs["helps"] for one in done if "helps" in one.kept]
            often = f"{np.mean(pairs):.1f}" if pairs else "-"
            cells.append(f"{100 * len(pairs) / tunes:.0f} ({often})")
        print(f"{name:24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def collect(file: Path, starts: int) -> None:
    """Start the script so many times, one after the other; keep each start's steps."""
    lists = []
    for place in range(starts):
        command = [sys.executable, str(_SCRIPT), str(STEPS)]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=True
        )
        lists.append(json.loads(done.stdout))
        print(f"start {place + 1} of {starts}: {np.median(lists[-1]):.3f} ms", file=sys.stderr)
        file.write_text(json.dumps({"script": _SCRIPT.name, "steps_ms": lists}) + "\n")


def resampled(lists: Sequence[Sequence[float]]) -> Callable[[int], Draw]:
    """Each trial is a real start, drawn by chance; or, with an odd seed, the next one in time."""

    def draw(seed: int) -> Draw:
        chance = random.Random(seed)
        first = chance.randrange(len(lists))

        def trial(_: tuple[str, ...], number: int) -> Sequence[float]:
            place = first + number if seed % 2 else chance.randrange(len(lists))
            return lists[place % len(lists)]

        return trial

    return draw


def read_lists(file: Path) -> list[list[float]]:
    """What `collect` wrote; or one long list of steps, cut into stretches as long as a trial."""
    if file.suffix == ".json":
        lists: list[list[float]] = json.loads(file.read_text())["steps_ms"]
        return lists
    steps = read_step_list(file)
    whole = len(steps) // STEPS * STEPS
    stretches: list[list[float]] = steps[:whole].reshape(-1, STEPS).tolist()
    return stretches


def resample(files: Sequence[Path], tunes: int) -> None:
    print(f"of 100 tunes made of real steps, so many keep nothing ({tunes} tunes each; trials)")
    heads = "".join(f"{count:>16}" for count in COUNTS)
    print(f"{'file':24}{'starts':>8}{'differ by':>10}{heads}")
    for file in files:
        lists = read_lists(file)
        means = [float(without_pauses(steady_steps(steps)).mean()) for steps in lists]
        cells = []
        for count in COUNTS:
            keeps, trials = false_keeps(resampled(lists), count, tunes)
            cells.append(f"{100 - 100 * keeps / tunes:.1f} ({trials:.0f})")
        spread = float(np.std(np.log(means), ddof=1))
        row = "".join(f"{cell:>16}" for cell in cells)
        print(f"{file.stem:24}{len(lists):>8}{spread:>10.1%}{row}", flush=True)


def real(tunes: int, budget: str) -> None:
    """`stepscope tune` of a script that needs nothing, as a user would start it."""
    keeps = 0
    for place in range(tunes):
        with tempfile.TemporaryDirectory() as folder:
            answer = _tune(Path(folder) / "tune", budget)
        keeps += bool(answer["kept"])
        print(f"tune {place + 1}: kept {answer['kept'] or 'nothing'}", flush=True)
    print(f"{tunes - keeps} of {tunes} keep nothing")


def _tune(folder: Path, budget: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "stepscope", "tune", "--json", "--out", str(folder)]
    command += ["--budget", budget]
    done = subprocess.run(
        [*command, "--", sys.executable, str(_HEALTHY)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, tunes in (("simulate", 400), ("power", 200)):
        verbs.add_parser(name).add_argument("--tunes", type=int, default=tunes)
    collecting = verbs.add_parser("collect")
    collecting.add_argument("file", type=Path)
    collecting.add_argument("--starts", type=int, default=60)
    resampling = verbs.add_parser("resample")
    resampling.add_argument("files", type=Path, nargs="+")
    resampling.add_argument("--tunes", type=int, default=400)
    rerunning = verbs.add_parser("real")
    rerunning.add_argument("tunes", type=int)
    rerunning.add_argument("--budget", default="10m")
    options = vars(parser.parse_args())
    {
        "simulate": simulate,
        "power": power,
        "collect": collect,
        "resample": resample,
        "real": real,
    }[options.pop("verb")](**options)


if __name__ == "__main__":
    main()
