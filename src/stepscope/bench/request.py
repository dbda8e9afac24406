"""What a bench was asked for, the command that asks for it again, the tasks it comes to, and
the options of the training program.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

from stepscope.bench import catalogue
from stepscope.bench.task import BenchTask, check_task
from stepscope.bench.workload import SIZES, Size, TrainingWorkload
from stepscope.errors import UsageError

EXTRA = "extra"  # the tag of workloads outside the suite: they run by name, or with --all
PLAIN = "none"  # the set of no remedies, as --with has it


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """The options that decide what is measured."""

    names: tuple[str, ...] = ()  # empty: the suite
    size: Size = "tiny"
    everything: bool = False
    changes: Mapping[str, str] = field(default_factory=dict)
    remedies: tuple[tuple[str, ...], ...] = ((),)  # sets that take turns
    ranks: tuple[int, ...] = (1,)
    sweep: tuple[int, ...] = ()  # batches; empty: the size's own
    steps: int | None = None
    runs: int = 1

    @property
    def command(self) -> tuple[str, ...]:
        """What asks for the same again."""
        words = ["stepscope", "bench", *self.names, f"--size={self.size}"]
        words += ["--all"] if self.everything else []
        words += [f"--set={name}={value}" for name, value in self.changes.items()]
        if self.remedies != ((),):
            words += [f"--with={','.join(remedies) or PLAIN}" for remedies in self.remedies]
        words += [f"--ranks={_listed(self.ranks)}"] if self.ranks != (1,) else []
        words += [f"--sweep=batch={_listed(self.sweep)}"] if self.sweep else []
        words += [f"--steps={self.steps}"] if self.steps is not None else []
        return (*words, f"--runs={self.runs}")

    def tasks(self, workload: TrainingWorkload, remedies: tuple[str, ...]) -> Iterator[BenchTask]:
        """One for each number of ranks and batch of the sweep; UsageError for a size or setting
        that the workload does not have."""
        if self.sweep and "batch" in self.changes:
            raise UsageError("--sweep batch and --set batch: give one of them")
        batches = [{"batch": str(batch)} for batch in self.sweep] or [{}]
        for ranks, batch in product(self.ranks, batches):
            yield check_task(
                BenchTask(
                    workload=workload,
                    size=self.size,
                    changes={**self.changes, **batch},
                    remedies=remedies,
                    ranks=ranks,
                    steps=self.steps,
                    in_study=len(self.ranks) * len(batches) > 1,
                )
            )


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


class ChosenTasks(NamedTuple):
    tasks: tuple[BenchTask, ...]
    problems: tuple[str, ...] = ()  # workloads of other packages that cannot be used


def parse_size(text: str) -> Size:
    """UsageError with the nearest name."""
    for size in SIZES:
        if text == size:
            return size
    close = difflib.get_close_matches(text, SIZES, 1, 0.5)
    hint = f": did you mean {close[0]}?" if close else "."
    raise UsageError(f"there is no size {text}{hint} The sizes are {', '.join(SIZES)}")


def choose_tasks(request: BenchRequest) -> ChosenTasks:
    """UsageError for anything wrong with what was named; a workload that nobody named and that
    cannot be used is a problem, and the others go on."""
    tasks: list[BenchTask] = []
    problems = []
    for name in dict.fromkeys(request.names or catalogue.names()):
        try:
            workload = catalogue.load(name)
            if request.names or request.everything or EXTRA not in workload.tags:
                for remedies in request.remedies:
                    tasks += request.tasks(workload, remedies)
        except UsageError as error:
            if request.names or request.changes:
                raise
            problems.append(str(error))
    if not tasks:
        raise UsageError("; ".join(problems) or "there is no workload to run")
    return ChosenTasks(tuple(tasks), tuple(problems))


# The options of `python -m stepscope.bench.train`, which a saved run's command is read by too.


def options_parser(description: str = "") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stepscope.bench.train", description=description)
    parser.add_argument("name")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, help="default: as many as the target allows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    help_losses = "write the loss of every step and the machine's speed to this file"
    parser.add_argument("--losses", type=Path, help=help_losses)
    help_paced = (
        "run SECONDS of steps in turns with a reference load instead, and write the ratio to "
        "--losses"
    )
    parser.add_argument("--paced", type=float, metavar="SECONDS", help=help_paced)
    return parser
