"""The trials of a sweep while it runs: a table that changes in a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stepscope.records.figures import significant
from stepscope.ui.say import say
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from stepscope.fix.fuse.trials import SweptTrial
    from stepscope.ui.sweep.journal import EndedTrial

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
