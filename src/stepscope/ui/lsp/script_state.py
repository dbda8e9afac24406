"""What is known of a script, and what of it may be shown for the text as it is now.

Costs belong to the program that was measured or estimated. Once any of its files is another
program, they are stale: shown as what was, until an estimate or a measurement of the new one comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stepscope.ui.editor.follow import follow
from stepscope.ui.lsp.program_text import program_key

if TYPE_CHECKING:
    from stepscope.records.line_costs import FollowedLines, LineCost, LineCosts
    from stepscope.ui.lsp.measured_run import MeasuredRun

_MOST_FOLLOWED = 32  # texts, of all files of a script

Trust = Literal["measured", "estimated", "stale"]
TextOf = Callable[[Path], str | None]  # a file as it is now: in the editor, else on the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStep:
    """A training that is being measured, so far."""

    step: int
    step_ms: float | None
    message: str


@dataclass(slots=True, kw_only=True)
class ScriptState:
    """One script. Changed by the server's loop only."""

    script: Path
    measured: MeasuredRun | None = None
    estimate: LineCosts | None = None
    estimate_failed: str | None = None  # why the newest text has none
    error: str | None = None  # why the last profile gave nothing
    running_since: str | None = None  # ISO 8601
    live: LiveStep | None = None
    profile_on_save: bool | None = None  # None: as the settings say
    followed: dict[tuple[str, Path, str], FollowedLines] = field(default_factory=dict)

    def set_measured(self, measured: MeasuredRun) -> None:
        """A new measurement: what was estimated before it counts no more."""
        self.measured, self.estimate, self.estimate_failed, self.error = measured, None, None, None
        self.followed.clear()

    def set_estimate(self, costs: LineCosts | None, failed: str | None) -> None:
        self.estimate, self.estimate_failed = costs, failed
        self.followed.clear()

    def covers(self, file: Path) -> bool:
        """Whether costs of this file's lines are known through this script."""
        costs = self.measured.costs if self.measured is not None else self.estimate
        return file == self.script or (costs is not None and str(file) in costs.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCosts:
    """Costs, and how far they can be trusted for the program as it is now."""

    costs: LineCosts
    trust: Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownLine:
    """What one line costs, at its place today (from 1)."""

    cost: LineCost
    line: int
    trust: Trust
    estimated: bool  # the figures were estimated, stale or not


def choose_costs(state: ScriptState, text_of: TextOf) -> ShownCosts | None:
    """Measured for this very program, else estimated for it, else what was measured before."""
    measured = state.measured.costs if state.measured is not None else None
    if measured is not None and is_same_program(measured, text_of):
        return ShownCosts(costs=measured, trust="measured")
    if state.estimate is not None and is_same_program(state.estimate, text_of):
        return ShownCosts(costs=state.estimate, trust="estimated")
    last = measured or state.estimate
    return ShownCosts(costs=last, trust="stale") if last is not None else None


def is_same_program(costs: LineCosts, text_of: TextOf) -> bool:
    """Whether every file that was part of it still is the same program."""
    for file, before in costs.texts.items():
        now = text_of(Path(file))
        if now is None:
            return False
        if now != before and (program_key(now) is None or program_key(now) != program_key(before)):
            return False
    return True


def followed_lines(
    state: ScriptState, costs: LineCosts, file: Path, text: str
) -> FollowedLines | None:
    """Where measured lines are in today's text; None for a file that was not part of it."""
    if str(file) not in costs.texts:
        return None
    key = (costs.kind, file, text)
    if key not in state.followed:
        if len(state.followed) >= _MOST_FOLLOWED:
            state.followed.clear()
        state.followed[key] = follow(costs, file, text)
    return state.followed[key]


def shown_lines(state: ScriptState, file: Path, text: str, text_of: TextOf) -> list[ShownLine]:
    """Of one file, in the order of its lines."""
    shown = choose_costs(state, text_of)
    followed = followed_lines(state, shown.costs, file, text) if shown is not None else None
    if shown is None or followed is None:
        return []
    lines = [
        ShownLine(
            cost=one.cost,
            line=one.line,
            trust="stale" if one.state == "stale" else shown.trust,
            estimated=shown.costs.kind == "estimated",
        )
        for one in followed.lines
        if one.line is not None
    ]
    return sorted(lines, key=lambda one: one.line)
