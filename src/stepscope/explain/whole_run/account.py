"""Where a rank's share of the command's wall time went, to the nanosecond.

Steps follow each other: each begins where the one before ended. What lies before the first batch is
start-up, what follows the last step is shut-down, and a gap between two steps is time that capture
took for itself. Everything else is inside a step, and there each nanosecond belongs to one phase.
So the account adds up to the wall time exactly, whatever was captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.step_columns import USUAL_PHASES
from stepscope.records.whole_run import ACCOUNT, AccountPart, RunAccount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.run_times import RunTimes
    from stepscope.records.step_columns import Flags, StepColumns

_OWN_PARTS = ("evaluation", "checkpoint", "between_epochs")
TRAINING_PHASES = (*USUAL_PHASES, "gc", "compile")
_CLOCKS_APART = 0.001  # steps and their ends are read from two clocks, one after the other
_START_UP = ("launch", "imports", "process_group", "build", "first_batch")


class _Ledger(msgspec.Struct):
    """Nanoseconds by part of the account, and by the parts of some of them."""

    sums: dict[str, int]
    inner: dict[str, dict[str, int]] = {}

    def add(self, name: str, ns: int) -> None:
        self.sums[name] = self.sums.get(name, 0) + ns

    def add_compiling(self, name: str, ns: int, compiling_ns: int) -> None:
        """As `add`; what torch.compile took of it is a part of its own."""
        self.add(name, ns)
        parts = self.inner.setdefault(name, {"compile": 0, "other": 0})
        parts["compile"] += compiling_ns
        parts["other"] += ns - compiling_ns

    def divide(self, name: str, parts: dict[str, int]) -> None:
        self.inner[name] = parts
        self.add(name, sum(parts.values()))


def account_for(steps: StepColumns | None, warm_up: int, times: RunTimes) -> RunAccount:
    """`warm_up` steps are the first ones; they compile and autotune."""
    ledger = _Ledger(dict.fromkeys(ACCOUNT, 0), {})
    notes = list(times.notes)
    if steps is not None and len(steps):
        _add_steps(ledger, steps, warm_up)
        begins = int(steps.end_unix_ns[0] - steps.wall_ns[0])
        first = {phase: int(column[0]) for phase, column in steps.phases_ns.items()}
        _add_start_up(ledger, max(0, begins - times.began_ns), first, times, notes)
        _add_shut_down(ledger, int(steps.end_unix_ns[-1]), times)
    return _close(ledger, max(0, times.ended_ns - times.began_ns), notes)


def mean_account(accounts: Sequence[RunAccount]) -> RunAccount | None:
    """The mean over ranks; None without any. Accounts of one command share its wall time."""
    if not accounts:
        return None
    return RunAccount(
        wall_ms=_mean([account.wall_ms for account in accounts]),
        goodput=_mean([account.goodput for account in accounts]),
        parts=_mean_parts([account.parts for account in accounts]),
        notes=tuple(dict.fromkeys(note for account in accounts for note in account.notes)),
    )


def add_accounts(accounts: Sequence[RunAccount]) -> RunAccount:
    """Of attempts that followed each other."""
    wall = sum(account.wall_ms for account in accounts)
    mean = mean_account(accounts)
    if mean is None or len(accounts) == 1:
        return accounts[0]
    count = len(accounts)
    return RunAccount(
        wall_ms=wall,
        goodput=_ms(mean.parts, "training") * count / wall if wall else 0.0,
        parts=tuple(_stretch(part, count, wall) for part in mean.parts),
        notes=mean.notes,
    )


def widen_account(account: RunAccount, before_ns: int, after_ns: int) -> RunAccount:
    """Begin earlier and end later: other hosts had begun, or had not ended."""
    if not before_ns and not after_ns:
        return account
    wall = account.wall_ms + (before_ns + after_ns) / 1e6
    longer = {"start_up": before_ns / 1e6, "launch": before_ns / 1e6, "shut_down": after_ns / 1e6}
    parts = tuple(_lengthen(part, longer, wall) for part in account.parts)
    goodput = _ms(parts, "training") / wall if wall else 0.0
    return replace(account, wall_ms=wall, goodput=goodput, parts=parts)


def _lengthen(part: AccountPart, longer: dict[str, float], wall: float) -> AccountPart:
    ms = part.ms + longer.get(part.id, 0.0)
    inner = tuple(_lengthen(one, longer, wall) for one in part.parts)
    return AccountPart(id=part.id, ms=ms, share=ms / wall if wall else 0.0, parts=inner)


def _ms(parts: Sequence[AccountPart], name: str) -> float:
    return sum(part.ms for part in parts if part.id == name)


def _stretch(part: AccountPart, count: int, wall: float) -> AccountPart:
    ms = part.ms * count
    inner = tuple(_stretch(one, count, wall) for one in part.parts)
    return AccountPart(id=part.id, ms=ms, share=ms / wall if wall else 0.0, parts=inner)


def _add_steps(ledger: _Ledger, steps: StepColumns, warm_up: int) -> None:
    """All steps but the first, which belongs to start-up in part. What the script would have done
    without us is never a window's: it may evaluate or compile in a step that we record."""
    place = np.arange(len(steps))
    ours = (steps.window | steps.memory) & (place > 0)
    plain = ~ours & (place > 0)
    warm = place < warm_up
    steady = plain & ~warm
    special = np.zeros(len(steps), np.int64)
    for name in _OWN_PARTS:
        if (column := steps.phases_ns.get(name)) is not None:
            ledger.add(name, int(column[place > 0].sum()))
            special += column
    rest = steps.wall_ns - special
    compiling = steps.phases_ns.get("compile", np.zeros(len(steps), np.int64))
    in_windows = int((rest - compiling)[ours].sum()) + _time_between(steps, ours)
    ledger.add("windows", in_windows)
    compiling_ns = int(compiling[warm & (place > 0)].sum())
    warming_ns = int(rest[warm & plain].sum()) + int(compiling[warm & ours].sum())
    ledger.add_compiling("first_steps", warming_ns, compiling_ns)
    training = {
        phase: int(steps.phases_ns[phase][steady].sum())
        for phase in TRAINING_PHASES
        if phase in steps.phases_ns
    }
    unphased = int(rest[steady].sum()) - sum(training.values())
    if "compile" in training:
        training["compile"] += int(compiling[ours & ~warm].sum())
    ledger.divide("training", {**training, "other": training.get("other", 0) + unphased})


def _time_between(steps: StepColumns, ours: Flags) -> int:
    """Between two steps, next to one of ours: opening and saving a window."""
    starts = steps.end_unix_ns - steps.wall_ns
    gaps = np.maximum(starts[1:] - steps.end_unix_ns[:-1], 0)
    return int(gaps[ours[1:] | ours[:-1]].sum())


def _add_start_up(
    ledger: _Ledger, before: int, first: dict[str, int], times: RunTimes, notes: list[str]
) -> None:
    """The first step begins when our code is loaded. What is left of it is a first step. Garbage
    collection there is that of imports: they create many objects."""
    rest = dict(first)
    for name in _OWN_PARTS:  # a trainer may evaluate before it trains
        ledger.add(name, rest.pop(name, 0))
    start = {"launch": before, "first_batch": rest.pop("data", 0)}
    build = rest.pop("other", 0) + rest.pop("gc", 0)
    if times.first_batch_ns is None and rest.get("forward"):
        build += rest.pop("forward")
        notes.append("no data loader was seen: the first forward pass is counted as start-up")
    for name, ns in (("imports", times.imports_ns), ("process_group", times.group_ns)):
        start[name] = min(build, ns)
        build -= start[name]
    start["build"] = build
    ledger.divide("start_up", {name: start[name] for name in _START_UP})
    ledger.add_compiling("first_steps", sum(rest.values()), rest.get("compile", 0))


def _add_shut_down(ledger: _Ledger, last_end_ns: int, times: RunTimes) -> None:
    """What follows the last step; evaluation and checkpoints there count as such."""
    left = max(0, times.ended_ns - last_end_ns)
    for name in _OWN_PARTS:
        after = min(left, times.after_last_ns.get(name, 0))
        ledger.add(name, after)
        left -= after
    ledger.add("shut_down", left)


def _close(ledger: _Ledger, wall: int, notes: list[str]) -> RunAccount:
    sums = ledger.sums
    if not ledger.inner.get("first_steps", {}).get("compile"):
        ledger.inner.pop("first_steps", None)  # nothing was compiled
    sums["outside"] += wall - sum(sums.values())
    if sums["outside"] < 0:
        if sums["outside"] < -_CLOCKS_APART * wall:
            notes.append("steps claim more than the wall time: a clock was set during the run")
        _take_back(sums)
    return RunAccount(
        wall_ms=wall / 1e6,
        goodput=sums["training"] / wall if wall else 0.0,
        parts=tuple(_part(name, sums[name], wall, ledger.inner.get(name)) for name in ACCOUNT),
        notes=tuple(notes),
    )


def _take_back(sums: dict[str, int]) -> None:
    """Steps that claim more than the wall time are cut, the largest part first."""
    debt, sums["outside"] = -sums["outside"], 0
    for name in sorted(sums, key=lambda part: -sums[part]):
        taken = min(debt, sums[name])
        sums[name] -= taken
        debt -= taken


def _part(name: str, ns: int, wall: int, inner: dict[str, int] | None = None) -> AccountPart:
    parts = _scaled(inner, ns) if inner else {}
    return AccountPart(
        id=name,
        ms=ns / 1e6,
        share=ns / wall if wall else 0.0,
        parts=tuple(_part(key, value, wall) for key, value in parts.items()),
    )


def _scaled(parts: dict[str, int], ns: int) -> dict[str, int]:
    """So that they add up to `ns`: the part may have been cut. The largest gets the rounding."""
    whole = sum(parts.values())
    if whole == ns or not whole:
        return parts
    scaled = {name: value * ns // whole for name, value in parts.items()}
    scaled[max(scaled, key=lambda name: scaled[name])] += ns - sum(scaled.values())
    return scaled


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_parts(lists: Sequence[Sequence[AccountPart]]) -> tuple[AccountPart, ...]:
    names = dict.fromkeys(part.id for parts in lists for part in parts)
    out = []
    for name in names:
        same = [next((part for part in parts if part.id == name), None) for parts in lists]
        out.append(
            AccountPart(
                id=name,
                ms=_mean([part.ms if part else 0.0 for part in same]),
                share=_mean([part.share if part else 0.0 for part in same]),
                parts=_mean_parts([part.parts if part else () for part in same]),
            )
        )
    return tuple(out)
