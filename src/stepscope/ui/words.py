"""One vocabulary for every surface: the parts of a step, a run's stalls and pace, an
answer's first lines, and names from outside made printable. It imports no other file of
ui.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from stepscope.text.figures import factor, long_duration, milliseconds, percent, significant, size
from stepscope.text.words import STEP_PARTS, counted

if TYPE_CHECKING:
    from stepscope.records.explanation import Explanation
    from stepscope.records.run import (
        AccountPart,
        LevelChange,
        LiveRank,
        LiveRun,
        MemoryGrowth,
        RankRun,
        RunAccount,
        RunOrigin,
        Stall,
        StallCause,
        StepTimes,
        VerdictNow,
    )

_STALL_HINTS: dict[StallCause, str] = {
    "data": "The data loader had no batch ready.",
    "evaluation": "The model was evaluated between two training steps.",
    "checkpoint": "A checkpoint was saved between two training steps.",
    "gc": "Python's garbage collector ran.",
    "compile": "torch.compile compiled or recompiled.",
    "allocator": "The device's allocator ran out of memory and tried again.",
    "collective": "This rank waited for another one in a collective.",
    "operating_system": "No CPU core was free, or pages came from disk.",
    "logging": "Python between two steps: logging, printing, .item().",
    "unknown": "No cause was measured in these steps.",
    "collecting": "The model collected experience between two training steps.",
    "generating": "The model generated samples between two training steps.",
    "without_gradients": "Passes without gradients ran between two training steps.",
}
# cause of a stall -> (label, what it means)
STALLS: dict[StallCause, tuple[str, str]] = {
    cause: (STEP_PARTS[f"stall_{cause}"].label, hint) for cause, hint in _STALL_HINTS.items()
}
_BUSY_HINTS = {
    "compute": "Kernels run (on a CPU: operators).",
    "exposed_comm": "Communication that does not overlap with compute.",
    "exposed_memory": "Copies and memsets while nothing else runs.",
}
_IDLE_HINTS = {
    "data_loading": "The device is idle while the CPU waits for the next batch.",
    "sync": "The device is idle after a call that made the CPU wait for it.",
    "operators": "The device is idle while the CPU is inside PyTorch operators.",
    "python": "The device is idle while Python runs between PyTorch operators.",
    "profiler": "The device waits for the profiler itself; absent without it.",
    "idle_launch": "Launched work is on its way to the device.",
    "idle_other": "The device is idle with work queued, or for an unknown reason.",
}
# id of a part -> (label, whether the device is idle then, what it means)
PARTS = {
    **{part: (STEP_PARTS[part].label, False, hint) for part, hint in _BUSY_HINTS.items()},
    **{part: (STEP_PARTS[part].label, True, hint) for part, hint in _IDLE_HINTS.items()},
    **{f"stall_{cause}": (label, False, hint) for cause, (label, hint) in STALLS.items()},
}
# part of the wall time -> (label, what it means)
ACCOUNT_PARTS = {
    "start_up": ("Start-up", "Imports, process group, model and first batch."),
    "first_steps": ("First steps", "Warm-up: compilation, autotuning, caches that fill."),
    "training": ("Steady training", "Training steps after the warm-up."),
    "evaluation": ("Evaluation", "The model was evaluated."),
    "collecting": ("Collecting experience", "The model acted to collect what it learns from."),
    "generating": ("Generating", "The model generated samples."),
    "without_gradients": ("Without gradients", "Passes without gradients outside the steps."),
    "checkpoint": ("Checkpoints", "Checkpoints were saved."),
    "between_epochs": ("Between epochs", "From an epoch's last step to the next one's first."),
    "windows": (
        "stepscope's profiling",
        "Steps in which stepscope's profiler or memory capture ran.",
    ),
    "outside": ("Outside any step", "Time that belongs to no step."),
    "shut_down": ("Shut-down", "From the last step to the end of the command."),
}
_Value = TypeVar("_Value")
_NOISE = re.compile(r"^void |at::native::|\(anonymous namespace\)::|std::|c10::")


def printable(text: str) -> str:
    """Replace control characters by visible symbols; line breaks stay."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char == "\n" or char.isprintable() or unicodedata.category(char) == "Zs"
        else chr(0x2400 + ord(char))
        if ord(char) < 0x20
        else "\ufffd"
        for char in text
    )


def one_line(text: str) -> str:
    """Replace line breaks too, for a name or a sentence with names in it."""
    return printable(text).replace("\n", "\u240a")


def applied_line(origin: RunOrigin | None) -> str:
    """bf16, fused-optimizer; tf32 was refused: it needs a CUDA device. "" for a plain run."""
    remedies = origin.remedies if origin else ()
    applied = [remedy.words for remedy in remedies if remedy.outcome == "applied"]
    others = [remedy.words for remedy in remedies if remedy.outcome != "applied"]
    return "; ".join([*([", ".join(applied)] if applied else []), *others])


def failed_line(explanation: Explanation) -> str:
    """exit code 1 after step 1,200: ValueError: bad batch (train.py:33 in main). "" for a command
    that ended well. The steps that were seen stand in where no process told."""
    failed = explanation.origin.failed if explanation.origin else None
    if failed is None:
        return ""
    if failed.step is None and explanation.run is not None:
        steps = max((rank.steps for rank in explanation.run.ranks), default=0)
        failed = replace(failed, step=steps)
    return f"the command failed: {failed.words}"


def or_dash(value: _Value | None, words: Callable[[_Value], str]) -> str:
    """What is not known has a dash."""
    return "-" if value is None else words(value)


def short_kernel(name: str, width: int) -> str:
    """A kernel's C++ name without return type and namespaces; the middle is cut if it is long."""
    text = _NOISE.sub("", name)
    text = re.sub(r"\(.*\)\s*(\[.*\])?$", "", text) or name
    if len(text) <= width:
        return text
    keep = max(4, width - 1)
    front = keep * 2 // 3
    return f"{text[:front]}…{text[len(text) - (keep - front) :]}"


# The first lines of every answer: the verdict, why it is so, what to do next.


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    verdict: str
    why: str
    next: str


# The whole run in words: how often steps stall, where wall time went, when the step changed.

VISIBLE = 0.005  # of the wall time
_TRAINING = "training"
# Parts of start-up and of training in the account.
_INNER_PARTS = {
    "launch": "launch",
    "imports": "imports",
    "process_group": "process group",
    "build": "model and the rest",
    "first_batch": "first batch",
    "gc": "garbage collection",
    "compile": "compilation",
    "between_epochs": "between epochs",
    "checkpoint": "checkpoints",
}


def phase_words(phase: str) -> str:
    """A phase of a step, or a part of a part of the account."""
    return _INNER_PARTS.get(phase, phase.replace("_", " "))


def account_words(part: AccountPart) -> str:
    """Name a part: start-up, steady training, stepscope's profiling."""
    known = ACCOUNT_PARTS.get(part.id)
    return known[0].lower() if known else phase_words(part.id)


def account_items(account: RunAccount, without: str = "") -> list[str]:
    """Training, then the other parts that count, the largest first."""
    parts = sorted(account.parts, key=lambda part: (part.id != _TRAINING, -part.share))
    listed = [part for part in parts if part.share >= VISIBLE or part.id == _TRAINING]
    return [f"{account_words(part)} {percent(part.share)}" for part in listed if part.id != without]


def rank_name(run: RankRun) -> str:
    """3, or 3.2 for its second process, as the folders are called."""
    return f"{run.rank}" if run.attempt == 1 else f"{run.rank}.{run.attempt}"


def stall_words(stall: Stall) -> str:
    return STALLS[stall.cause][0].lower()


def stall_time_words(stall: Stall) -> str:
    """What one of them takes; a wait for ranks of other hosts with the clocks' error."""
    if not stall.steps:
        return ""
    words = milliseconds(stall.typical_ms)
    error = stall.wait_error_ms
    return f"{words} (±{milliseconds(error)})" if error else words


def how_often(stall: Stall) -> str:
    """271 steps, every 4; 21 steps; between epochs only."""
    if not stall.steps:
        return "between epochs"
    steps = counted(stall.steps, "step")
    return f"{steps}, every {stall.period:,}" if stall.period else steps


def times_items(times: StepTimes) -> list[str]:
    """The mean step with its interval, then what the mean hides."""
    low, high = significant(times.low_ms), significant(times.high_ms)
    span = "" if low == high else f" ({low} to {high})"
    return [
        f"mean {milliseconds(times.mean_ms)}{span}",
        f"median {milliseconds(times.median_ms)}",
        f"p99 {milliseconds(times.p99_ms)}",
        f"longest {milliseconds(times.longest_ms)}",
    ]


def change_words(change: LevelChange) -> str:
    """step 300: 31.0 -> 62.0 ms (2.0 times)."""
    before, after = significant(change.before_ms), milliseconds(change.after_ms)
    return f"step {change.step:,}: {before} -> {after} ({factor(change.factor)} times)"


def list_changes(changes: Iterable[LevelChange]) -> list[str]:
    return [change_words(change) for change in changes]


def growth_words(growth: MemoryGrowth) -> str:
    sign = "-" if growth.bytes_per_step < 0 else "+"
    return f"{sign}{size(abs(growth.bytes_per_step))} a step"


# A run that goes on in words: progress, memory, ranks. For the terminal and for the live page.

_MOST_CHANGES = 2
_NOTABLE_SPREAD = 1.005  # is printed as 1.01


def progress_items(run: LiveRun, rank: LiveRank) -> list[str]:
    rates = [
        f"{or_dash(rank.recent_steps_per_s, significant)} a second now",
        f"{or_dash(rank.steps_per_s, significant)} on average",
    ]
    return [done_words(run), *rates, *window_items(rank)]


def done_words(run: LiveRun) -> str:
    """400 steps, or 398 to 400 steps where ranks differ."""
    counts = [rank.run.steps for rank in run.ranks]
    fewest, most = min(counts), max(counts)
    done = counted(most, "step")
    return f"{fewest:,} to {done}" if fewest < most else done


def window_items(rank: LiveRank) -> list[str]:
    return [f"{counted(rank.windows, 'window')} recorded"] if rank.windows else []


def matters(stall: Stall) -> bool:
    return stall.share >= VISIBLE or stall.between_epochs_ms > 0


def latest_changes(rank: LiveRank) -> list[str]:
    words = list_changes(rank.run.changes)
    more = len(words) - _MOST_CHANGES
    return [*([f"{more:,} earlier"] if more > 0 else []), *words[-_MOST_CHANGES:]]


def account_so_far(rank: LiveRank) -> list[str]:
    goodput = [f"goodput {percent(rank.goodput)}"] if rank.goodput is not None else []
    account = rank.run.account
    return [*goodput, *(account_items(account, "training") if account else ())]


def memory_items(rank: LiveRank) -> list[str]:
    growth = rank.run.memory_growth
    whose = "" if rank.on_device else "the process has "
    held = f"{whose}{size(rank.memory_bytes or 0)} when the last step ended"
    now = [held] if rank.memory_bytes else []
    return [*now, *([growth_words(growth)] if growth else [])]


def spread_words(run: LiveRun) -> str:
    """How far the mean steps lie apart. Ranks that wait for each other take the same time."""
    if run.spread is None:
        return ""
    timed = [rank for rank in run.by_mean if rank.run.times is not None]
    slowest, fastest = timed[0], timed[-1]
    if slowest.run.times is None or fastest.run.times is None:
        return ""
    if run.spread < _NOTABLE_SPREAD:
        return "a step takes the same time on all ranks"
    return (
        f"rank {slowest.run.rank} takes {milliseconds(slowest.run.times.mean_ms)}, "
        f"{factor(run.spread)} times rank {fastest.run.rank}"
    )


def attempt_words(earlier: Sequence[LiveRank]) -> list[str]:
    """One sentence for each attempt that has ended, in the order of time."""
    rows = []
    for attempt in sorted({rank.run.attempt for rank in earlier}):
        ranks = [rank for rank in earlier if rank.run.attempt == attempt]
        steps = max(rank.run.steps for rank in ranks)
        seconds = max(rank.seconds for rank in ranks)
        means = [rank.run.times.mean_ms for rank in ranks if rank.run.times]
        pace = f", {milliseconds(max(means))} a step" if means else ""
        took = long_duration(1e9 * seconds)
        rows.append(f"{attempt} ended after {counted(steps, 'step')} in {took}{pace}")
    return rows


def samples_per_s(run: LiveRun, verdict: VerdictNow | None) -> float | None:
    """Of all ranks together; known once a window has shown the batch."""
    if verdict is None or verdict.batch is None:
        return None
    rates = [rank.recent_steps_per_s for rank in run.ranks]
    return verdict.batch * sum(rate or 0.0 for rate in rates) if any(rates) else None
