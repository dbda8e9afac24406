"""Ask a running job for a window now, and see what became of the last request."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Literal

import msgspec

from stepscope.errors import UsageError
from stepscope.measure.folder import why_refused, write_json
from stepscope.records.window_request import ID, REQUEST, SCHEMA, plan_name, step_trace
from stepscope.records.words import counted
from stepscope.trace.decode import Oddities
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.trace.follow_run import FollowedRank, FollowedRun

WindowState = Literal[
    "asked",  # no rank has seen the request yet
    "unanswered",  # for so long that none will
    "planned",
    "recording",
    "saving",
    "recorded",
    "refused",
    "missed",  # the job ended before its trace was there
]
PENDING = frozenset({"asked", "planned", "recording", "saving"})
_PATIENCE_S = 60.0
_STEPS_TO_SAVE = 1000


class AskedWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The last request, and what became of it."""

    state: WindowState
    words: str

    @property
    def is_pending(self) -> bool:
        return self.state in PENDING


class _Request(msgspec.Struct, frozen=True):
    id: str = ""
    asked_unix: float = 0.0


class _Plan(msgspec.Struct, frozen=True):
    first: int = 0
    warmup: int = 0
    active: int = 1
    refused: str | None = None

    @property
    def first_active(self) -> int:
        return self.first + self.warmup

    @property
    def last(self) -> int:
        return self.first_active + self.active - 1

    @property
    def steps(self) -> str:
        if self.active == 1:
            return f"step {self.last:,}"
        return f"steps {self.first_active:,} to {self.last:,}"


def ask_for_window(followed: FollowedRun, now: float) -> str:
    """The request's id. UsageError where no window can come, or one is coming already."""
    if not _training(followed):
        has_ranks = "has ended" if followed.ranks else "has not ended a step yet"
        raise UsageError(f"no window: the job {has_ranks}")
    before = last_asked_window(followed, now)
    if before is not None and before.is_pending:
        raise UsageError(f"a window is on its way: {before.words}")
    request = secrets.token_hex(8)
    content = {"schema": SCHEMA, "id": request, "asked_unix": now}
    try:
        write_json(followed.folder / REQUEST, content)
    except OSError as error:
        raise UsageError(f"{followed.folder} cannot be written: {why_refused(error)}") from None
    return request


def last_asked_window(followed: FollowedRun, now: float) -> AskedWindow | None:
    """None if nobody asked for a window."""
    request = read_record(followed.folder / REQUEST, _Request, Oddities(REQUEST))
    if request is None or not ID.fullmatch(request.id):
        return None
    name = plan_name(request.id)
    plan = read_record(followed.folder / name, _Plan, Oddities(name))
    has_ended = not _training(followed)
    waited_s = now - request.asked_unix
    if plan is None:
        return _unplanned(waited_s, has_ended=has_ended)
    if plan.refused:
        return AskedWindow(state="refused", words=f"refused: {plan.refused}")
    return _planned(plan, followed, waited_s, has_ended=has_ended)


def _unplanned(waited_s: float, *, has_ended: bool) -> AskedWindow:
    if has_ended:
        return AskedWindow(state="missed", words="the job ended before the window")
    if waited_s > _PATIENCE_S:
        words = "no rank has answered: the ranks run without stepscope, or in another folder"
        return AskedWindow(state="unanswered", words=words)
    return AskedWindow(state="asked", words="requested; the ranks choose the steps")


def _planned(
    plan: _Plan, followed: FollowedRun, waited_s: float, *, has_ended: bool
) -> AskedWindow:
    ranks = len({rank.rank for rank in followed.ranks})
    traces = _count_traces(plan, followed.folder, followed.ranks)
    if traces:
        of = counted(ranks, "rank") if traces >= ranks else f"{traces:,} of {ranks:,} ranks"
        return AskedWindow(state="recorded", words=f"{plan.steps} recorded on {of}")
    if has_ended:
        return AskedWindow(state="missed", words=f"the job ended before {plan.steps} were saved")
    now = min((_last_step(rank) for rank in _training(followed)), default=-1) + 1
    if now < plan.first:
        return AskedWindow(state="planned", words=f"{plan.steps} will be recorded")
    if now <= plan.last:
        return AskedWindow(state="recording", words=f"recording {plan.steps}")
    if waited_s > _PATIENCE_S and now > plan.last + _STEPS_TO_SAVE:
        words = f"{plan.steps} left no trace: `problems` in rank.json may say why"
        return AskedWindow(state="missed", words=words)
    return AskedWindow(state="saving", words=f"saving {plan.steps}")


def _training(followed: FollowedRun) -> list[FollowedRank]:
    """Those of a host that cannot be seen from here may train."""
    return [rank for rank in followed.ranks if rank.state in ("running", "unknown")]


def _count_traces(plan: _Plan, folder: Path, ranks: Sequence[FollowedRank]) -> int:
    """Ranks that have the trace, in whichever attempt."""
    name = step_trace(plan.first_active)
    return len({rank.rank for rank in ranks if (folder / rank.folder_name / name).is_file()})


def _last_step(rank: FollowedRank) -> int:
    numbers = rank.steps.recent.number
    return int(numbers[-1]) if len(numbers) else -1
