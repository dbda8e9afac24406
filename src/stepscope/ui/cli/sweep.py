"""stepscope sweep: train a model with many settings, several models at a time."""

from __future__ import annotations

import json
import math
import runpy
import shlex
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec
from msgspec import to_builtins

from stepscope.errors import NotCapturedError, UnreadableInputError, UsageError
from stepscope.text.figures import significant
from stepscope.text.words import SITE, counted
from stepscope.ui.cli.options import (
    complete_file,
    count_option,
    flag,
    folder_option,
    json_option,
    out_option,
    verb,
)
from stepscope.ui.jobs.run_folder import claim_or_refuse
from stepscope.ui.json_text import append_line, read_journal
from stepscope.ui.say import say
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from stepscope.fix.fuse.sweep import SweptTrial


@verb(
    "sweep",
    examples=(
        (
            "stepscope sweep train.py --grid lr=1e-3,3e-4 wd=0,0.1",
            "Train four settings, several models at a time",
        ),
        (
            "stepscope sweep train.py --grid lr=1e-3,3e-4 --fuse auto --steps 1000",
            "Train as many models together as fit into memory",
        ),
    ),
    groups={
        "What to train": "--grid --fuse --steps --seed --resume",
        "Output": "--every --out --json --quiet",
    },
)
@click.argument("script", shell_complete=complete_file)
@click.argument("more", nargs=-1, metavar="[NAME=VALUE,VALUE]...")
@click.option(
    "--grid",
    multiple=True,
    metavar="NAME=VALUE,VALUE",
    help="Settings to try, in every combination. More of them may follow as plain words.",
)
@click.option(
    "--fuse",
    default="8",
    show_default=True,
    metavar="N|auto",
    help="Models to train together. auto takes as many as fit into memory.",
)
@count_option("--steps", "Steps that each trial trains.", default=500)
@count_option("--every", "Steps between two reports of each trial's loss.", default=50)
@click.option("--seed", default=0, show_default=True, help="Every trial starts from this seed.")
@folder_option("--resume", "Resume the sweep in this folder with its own options.")
@out_option("Folder for the results (default: stepscope-runs/<time>-<script>).")
@json_option
@flag("--quiet", "Print nothing while trials train.")
def command(
    script: str,
    more: tuple[str, ...],
    grid: tuple[str, ...],
    resume: Path | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Train a model with every setting of a grid, several models at a time.

    SCRIPT defines build(config). Models of one architecture train together in one process, and each
    trains as it would alone.
    """

    words = (*grid, *more)
    journal = _resume(script, words, resume) if resume else _begin(script, words, out, options)
    code = 0
    if not quiet:
        say(f"sweep folder {journal.folder}")
    with shown_sweep(journal.start.steps, quiet=quiet) as shown:
        try:
            run_sweep(journal, shown)
        except KeyboardInterrupt:
            code = 130
    _print(journal, as_json=as_json)
    return code


def _begin(
    script: str, words: tuple[str, ...], out: Path | None, options: dict[str, Any]
) -> SweepJournal:

    axes = parse_axes(words)
    if not axes:
        raise UsageError("name the settings to try: --grid lr=1e-3,3e-4 wd=0,0.1")
    if not Path(script).is_file():
        raise UsageError(f"{script} does not exist")
    fuse = options.pop("fuse")
    if fuse != "auto" and (not fuse.isdecimal() or int(fuse) < 1):
        raise UsageError(f"--fuse {fuse}: write a number of models, or auto")
    start = SweepStart(
        script=str(Path(script).absolute()),
        grid={name: list(values) for name, values in axes.items()},
        fuse=None if fuse == "auto" else int(fuse),
        **options,
    )
    return SweepJournal.create(claim_or_refuse(out, (script,)), start)


def _resume(script: str, words: tuple[str, ...], folder: Path) -> SweepJournal:

    journal = SweepJournal.read(folder)
    if str(Path(script).absolute()) != journal.start.script:
        raise UsageError(f"{folder} is a sweep of {journal.start.script}, not of {script}")
    asked = {name: list(values) for name, values in parse_axes(words).items()}
    if asked and asked != journal.start.grid:
        raise UsageError(f"{folder} has another grid: leave out --grid to resume it")
    return journal


def _print(journal: SweepJournal, *, as_json: bool) -> None:

    click.echo(sweep_json(journal) if as_json else sweep_text(journal))


# Train the settings of a sweep that have not ended yet.


def run_sweep(journal: SweepJournal, shown: SweepTable) -> None:
    """Every ended trial is in the journal at once; the best one's weights are beside it."""
    from stepscope.fix.fuse.sweep import grid, sweep

    start = journal.start
    build = _load_build(start.script)
    settings = grid(**start.grid)
    done = {trial.number for trial in journal.ended}
    left = [number for number in range(len(settings)) if number not in done]

    def look(trial: SweptTrial) -> bool:
        shown.training(left[trial.number], trial)
        return not math.isfinite(trial.loss)

    configs = (settings[number] for number in left)
    trials = sweep(
        build,
        configs,
        steps=start.steps,
        width=start.fuse,
        every=start.every,
        seed=start.seed,
        stop=look,
    )
    for trial in trials:
        ended = _describe(trial, left[trial.number], start.script)
        if journal.is_better(ended):
            _save(journal, trial)  # first: what is in the journal is not trained again
        journal.add(ended)
        shown.ended(ended)
    if journal.ended and all(trial.state == "failed" for trial in journal.ended):
        raise NotCapturedError(f"every trial failed, the first one because {journal.ended[0].why}")


def _describe(trial: SweptTrial, number: int, script: str) -> EndedTrial:
    finite = math.isfinite(trial.loss)
    why = None
    if trial.error is not None:
        why = _failure(script, trial.error)
    elif trial.state == "stopped":
        why = "its loss is not finite"
    return EndedTrial(
        number=number,
        config=dict(trial.config),
        state=trial.state,  # type: ignore[arg-type]
        steps=trial.step,
        losses=[loss for loss in trial.losses if math.isfinite(loss)],
        loss=trial.loss if finite else None,
        why=why,
    )


def _save(journal: SweepJournal, trial: SweptTrial) -> None:
    import torch

    assert trial.model is not None
    new = journal.folder / f"{BEST}.new"
    torch.save({"config": dict(trial.config), "model": trial.model.state_dict()}, new)
    new.replace(journal.folder / BEST)


def _load_build(script: str) -> Callable[..., Any]:
    """Load the script's `build`; what it does only as a program is not run."""
    try:
        names = runpy.run_path(script, run_name="stepscope_sweep")
    except FileNotFoundError:
        raise UsageError(f"{script} does not exist") from None
    except Exception as error:
        raise NotCapturedError(_failure(script, error)) from error
    build = names.get("build")
    if not callable(build):
        raise UsageError(
            f"{script} has no function build(config) that returns model, optimizer, data and loss",
            f"see {SITE}/reference/libraries/sweep/ for an example",
        )
    found: Callable[..., Any] = build
    return found


def _failure(script: str, error: BaseException) -> str:
    """Return what was raised, and the place in the user's own file where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == script]
    where = f" in line {own[-1].lineno}" if own else ""
    return f"{script}{where}: {type(error).__name__}: {error}"


# The grid of a sweep, as it is written: lr=1e-3,3e-4 wd=0,0.1.

Value = bool | int | float | str


def parse_axes(words: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """Name -> values; UsageError for what is no NAME=VALUE,VALUE."""
    axes: dict[str, tuple[Value, ...]] = {}
    for word in words:
        name, _, values = word.partition("=")
        given = tuple(parse_value(value) for value in values.split(",") if value.strip())
        if not name.isidentifier() or not given:
            raise UsageError(f"{word!r} is not part of a grid: write NAME=VALUE,VALUE")
        if name in axes:
            raise UsageError(f"{name} appears twice in the grid: write all of its values once")
        axes[name] = given
    return axes


def parse_value(text: str) -> Value:
    """Return a number or a truth value where it is one."""
    text = text.strip()
    if text in ("true", "True", "false", "False"):
        return text in ("true", "True")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# trials.jsonl: what a sweep has finished, one line each, so that a killed one can go on.
#
# A line that was cut short is thrown away; its trial runs again, as do those that were training.

JOURNAL, BEST = "trials.jsonl", "best.pt"
_MOST_BYTES = 1 << 30


class SweepStart(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="kind"):
    """What was asked for: the first line."""

    script: str
    grid: dict[str, list[Any]]
    steps: int
    fuse: int | None  # None: as many as fit
    every: int
    seed: int
    schema: int = 1


class EndedTrial(msgspec.Struct, frozen=True, kw_only=True, tag="trial", tag_field="kind"):
    """One setting that has ended."""

    number: int  # its place in the grid
    config: dict[str, Any]
    state: Literal["finished", "stopped", "failed"]
    steps: int
    losses: list[float]  # the mean of every few steps
    loss: float | None  # the last of them; None: not finite, or none
    why: str | None = None  # it failed or was stopped


_LINE = msgspec.json.Decoder(SweepStart | EndedTrial)


class SweepJournal:
    """In the sweep's folder."""

    def __init__(self, folder: Path, start: SweepStart, ended: list[EndedTrial]) -> None:
        self.folder, self.start, self.ended = folder, start, ended

    @classmethod
    def create(cls, folder: Path, start: SweepStart) -> SweepJournal:
        append_line(folder / JOURNAL, start)
        return cls(folder, start, [])

    @classmethod
    def read(cls, folder: Path) -> SweepJournal:
        """UnreadableInputError if it is none; UsageError without a first line."""
        lines = read_journal(folder / JOURNAL, _MOST_BYTES)
        try:
            records = [_LINE.decode(line) for line in lines]
        except msgspec.MsgspecError as error:
            raise UnreadableInputError(
                f"{folder / JOURNAL} is not the journal of a sweep: {error}"
            ) from None
        if not records or not isinstance(records[0], SweepStart):
            raise UsageError(f"{folder} holds no sweep to resume: start a new one without --resume")
        ended = [record for record in records[1:] if isinstance(record, EndedTrial)]
        return cls(folder, records[0], ended)

    def add(self, trial: EndedTrial) -> None:
        append_line(self.folder / JOURNAL, trial)
        self.ended.append(trial)

    def best(self) -> EndedTrial | None:
        """Return the finished one with the lowest loss."""
        return min(filter(_has_result, self.ended), key=_loss, default=None)

    def is_better(self, trial: EndedTrial) -> bool:
        """Than all that are in it."""
        best = self.best()
        return _has_result(trial) and (best is None or _loss(trial) < _loss(best))


def _has_result(trial: EndedTrial) -> bool:
    return trial.state == "finished" and trial.loss is not None


def _loss(trial: EndedTrial) -> float:
    return math.inf if trial.loss is None else trial.loss


# The trials of a sweep while it runs: a table that changes in a terminal, lines elsewhere.

_ROWS = 20  # of the table; a terminal has few more


class SweepTable:
    """On stderr, the lowest loss first; those that train stand among those that have ended."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self._steps, self._quiet = steps, quiet
        self._rows: dict[int, tuple[float, tuple[str, ...]]] = {}
        self._live: Any = None

    def training(self, number: int, trial: SweptTrial) -> None:
        how = f"step {trial.step:,} of {self._steps:,}"
        self._put(number, trial.loss, config_words(trial.config), how)
        if self._live is None and not self._quiet:
            say(f"{config_words(trial.config)}: {how}, loss {significant(trial.loss)}")

    def ended(self, trial: EndedTrial) -> None:
        self._put(trial.number, trial.loss, config_words(trial.config), ending_words(trial))
        if self._live is None and not self._quiet:
            loss = f", loss {significant(trial.loss)}" if trial.loss is not None else ""
            say(f"{config_words(trial.config)}: {ending_words(trial)}{loss}")

    def _put(self, number: int, loss: float | None, config: str, how: str) -> None:
        shown = "" if loss is None else significant(loss)
        order = float("inf") if loss is None or loss != loss else loss
        self._rows[number] = order, (shown, config, how)
        if self._live is not None:
            self._live.update(self._table())

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for name in ("loss", "setting", ""):
            table.add_column(name, no_wrap=True, justify="right" if name == "loss" else "left")
        for _, words in sorted(self._rows.values())[:_ROWS]:
            table.add_row(*(Text(one_line(word)) for word in words))
        if len(self._rows) > _ROWS:
            table.add_row("", f"and {len(self._rows) - _ROWS:,} more", "")
        return table


@contextmanager
def shown_sweep(steps: int, *, quiet: bool) -> Iterator[SweepTable]:
    """The table disappears at the end: the answer has it in full."""
    shown = SweepTable(steps, quiet=quiet)
    if quiet or not sys.stderr.isatty():
        yield shown
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, refresh_per_second=4) as live:
        shown._live = live
        yield shown


def ending_words(trial: EndedTrial) -> str:
    """finished after 500 steps; failed after 0 steps: train.py in line 3: ValueError: ..."""
    why = f": {trial.why}" if trial.why else ""
    return f"{trial.state} after {trial.steps:,} steps{why}"


def config_words(config: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


# The answer of a sweep: the best setting first, then all of them.


def sweep_json(journal: SweepJournal) -> str:
    best = journal.best()
    return json.dumps(
        {
            "schema": 1,
            "folder": str(journal.folder),
            "script": journal.start.script,
            "settings": _settings(journal),
            "best": to_builtins(best) if best else None,
            "trials": [to_builtins(trial) for trial in _in_order(journal)],
        },
        indent=2,
    )


def sweep_text(journal: SweepJournal) -> str:
    """Return verdict, why and next; then every trial that has ended."""
    ended, best = _in_order(journal), journal.best()
    verdict = "no trial has finished"
    next_ = "see the reasons below, correct the script or its settings, and sweep again"
    if best is not None:
        lowest = significant(best.loss or 0.0)
        verdict = f"{config_words(best.config)} has the lowest loss, {lowest}"
        next_ = f'load the best weights: torch.load("{journal.folder / BEST}")["model"]'
    if len(ended) < _settings(journal):
        script, folder = shlex.quote(journal.start.script), shlex.quote(str(journal.folder))
        next_ = f"to go on: stepscope sweep {script} --resume {folder}"
    lines = [f"verdict  {verdict}", f"why      {_why(journal, ended)}", f"next     {next_}", ""]
    for trial in ended:
        loss = significant(trial.loss) if trial.loss is not None else "-"
        lines.append(f"{loss:>10}  {config_words(trial.config)}  {ending_words(trial)}")
    return "\n".join(one_line(line) for line in lines)


def _why(journal: SweepJournal, ended: list[EndedTrial]) -> str:
    """Say how many ended in which way, and how close the second best is."""
    states = Counter(trial.state for trial in ended)
    ways = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items()))
    words = f"{len(ended):,} of {counted(_settings(journal), 'trial')} ended"
    words += f": {ways}" if ways else ""
    finished = [trial for trial in ended if trial.state == "finished" and trial.loss is not None]
    if len(finished) > 1:
        second = finished[1]
        words += f"; the second best is {config_words(second.config)} with "
        words += significant(second.loss or 0.0)
    return words


def _in_order(journal: SweepJournal) -> list[EndedTrial]:
    """Sort by loss; those without one come last."""

    def order(trial: EndedTrial) -> tuple[bool, float, int]:
        return trial.loss is None, trial.loss or 0.0, trial.number

    return sorted(journal.ended, key=order)


def _settings(journal: SweepJournal) -> int:
    return math.prod(len(values) for values in journal.start.grid.values())
