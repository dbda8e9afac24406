"""Findings about the training loop: input, stalls, drift, start-up, evaluation, checkpoints."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from stepscope import changes as remedies
from stepscope.changes.change import Change
from stepscope.explain.findings.evidence import (
    LOW,
    RankEvidence,
    account_part,
    as_short_run,
    beside_steps,
    cost_lines,
    costly_stall,
    describe_loader,
    length_severity,
    offer_for_waits,
    places,
    rule,
    severity_of,
    stall_severity,
    stalling_steps,
    typical_wait,
    wanted_work_severity,
    where_words,
)
from stepscope.explain.host_calls import is_library_frame
from stepscope.records.explanation import GAP_CAUSES, Finding, Place, Remedy
from stepscope.records.rank_facts import LoaderUse
from stepscope.records.run import (
    CORE_WAIT,
    WITHOUT_GRADIENTS,
    LevelChange,
    RankRun,
    Stall,
    StallCause,
    Trend,
)
from stepscope.text.figures import duration, factor, milliseconds, percent
from stepscope.text.words import sentence


@rule("Waiting for data")
def data_loading(evidence: RankEvidence) -> Finding | None:
    """The device waits for the next batch. The device is idle while the training thread is
    inside the data loader."""
    share = evidence.budget_share("data_loading")
    if share < LOW:
        return None
    loader = evidence.run.loader if evidence.run else None
    return data_loading.finding(
        share=share,
        summary=f"The {evidence.device} waits for the data loader for {percent(share)} of the "
        "step.",
        evidence=(
            f"waiting for the next batch: {evidence.budget_ms('data_loading')}",
            *describe_loader(loader),
        ),
        where=places(evidence, (GAP_CAUSES.index("data_loading"),)),
        remedies=offer_for_waits(loader, gpu=not evidence.on_host),
    )


_MOST_WORKERS = 32  # a longer period is more likely an epoch
_SAME_LENGTH = 0.02  # of an epoch, which counts a batch more or less


@rule("Stalls for data", part="run")
def data_stalls(run: RankRun) -> Finding | None:
    """Some steps wait for data, though a typical step does not. Waits for the data loader
    beyond what every step waits."""
    stall = costly_stall(run, "data")
    if stall is None:
        return None
    waits = stalling_steps(stall, run, "waits", "wait")
    return data_stalls.finding(
        share=stall.share,
        severity=stall_severity(stall),
        summary=f"{waits} {typical_wait(stall)} for data{_explain_period(stall, run.loader)}.",
        evidence=(*cost_lines(stall, run), *describe_loader(run.loader)),
        where=stall.where,
        remedies=_offer_for_data(stall, run.loader),
    )


def _explain_period(stall: Stall, loader: LoaderUse | None) -> str:
    """Workers start together and stay in step, so batches come in bursts of one per worker."""
    if loader is not None and loader.workers > 1 and stall.period == loader.workers:
        return f": the loader's {stall.period} workers deliver in bursts"
    if loader is not None and _is_epoch(stall, loader):
        return ": an epoch begins"
    return ""


def _is_epoch(stall: Stall, loader: LoaderUse) -> bool:
    batches = loader.epoch_batches
    if stall.period is None or batches is None:
        return False
    return abs(stall.period / batches - 1) < _SAME_LENGTH


def _offer_for_data(stall: Stall, loader: LoaderUse | None) -> tuple[Remedy, ...]:
    """Workers that start with each epoch are the first thing to change where that is the stall."""
    offers = offer_for_waits(loader, gpu=False)
    if loader is None:
        persistent = remedies.PERSISTENT_WORKERS.offer(
            "If the DataLoader has workers, set persistent_workers=True: they then outlive an epoch"
        )
        rarely = stall.period is not None and stall.period > _MOST_WORKERS
        return (persistent, *offers) if rarely else (*offers, persistent)
    if not _is_epoch(stall, loader):
        return offers
    return tuple(sorted(offers, key=lambda remedy: remedy.id != remedies.PERSISTENT_WORKERS.id))


# Data, collections, compiling and the rest have findings of their own, with their period.
CAUSES: dict[StallCause, str] = {
    "logging": " in Python between two steps, as for logging or .item()",
    "operating_system": ": no core is free, or pages come from disk",
    "unknown": "",
}


_AS_LONG = 0.8  # of what such a step takes longer: the trace shows work, and it is no stall


@rule("Periodic stall")
def periodic_stall(evidence: RankEvidence) -> Finding | None:
    """Every N-th step takes longer, and none of the usual causes was measured in it."""
    return find_periodic_stall(evidence.run, evidence.longer_work_ns) if evidence.run else None


def find_periodic_stall(run: RankRun, longer_work_ns: float = 0.0) -> Finding | None:
    """The costliest stall that comes at a fixed distance."""
    stalls = [
        stall
        for stall in run.stalls
        if stall.period is not None and stall.cause in CAUSES and stall.share >= LOW
        if stall.cause != "unknown" or longer_work_ns < _AS_LONG * 1e6 * stall.typical_ms
    ]
    stall = max(stalls, key=lambda stall: stall.share, default=None)
    if stall is None:
        return None
    takes = stalling_steps(stall, run, "takes", "take")
    return periodic_stall.finding(
        share=stall.share,
        summary=f"{takes} {typical_wait(stall)} longer{where_words(stall) or CAUSES[stall.cause]}.",
        evidence=cost_lines(stall, run),
        where=stall.where,
        remedies=_offer_for_period(stall),
    )


def offer_for_line(stall: Stall) -> tuple[Remedy, ...]:
    """Where the sampled stacks name a line, nothing has to be recorded first."""
    place = next((place for place in stall.where if not is_library_frame(place)), None)
    if place is None or stall.cause == "operating_system":
        return ()
    return (remedies.LESS_OFTEN.offer(f"Run {place.words} less often, or make it cheaper"),)


def _offer_for_period(stall: Stall) -> tuple[Remedy, ...]:
    if by_line := offer_for_line(stall):
        return (*by_line, remedies.ON_STALL.offer())
    if stall.cause == "logging":
        return (
            remedies.LESS_OFTEN.offer(
                "Log less often than every "
                f"{stall.period} steps, or in another thread. Read values of the device only then"
            ),
            remedies.NO_SYNC.offer(),
        )
    if stall.cause == "operating_system":
        return (remedies.IDLE_MACHINE.offer(), remedies.ON_STALL.offer())
    return (remedies.ON_STALL.offer(),)


@rule("Irregular stalls", part="run")
def irregular_stalls(run: RankRun) -> Finding | None:
    """Some steps take longer, at no fixed distance, and none of the usual causes was
    measured. The costliest stall without a period that no other finding is about."""
    stalls = [
        stall
        for stall in run.stalls
        if stall.period is None and stall.cause in CAUSES and stall.share >= LOW
    ]
    stall = max(stalls, key=lambda stall: stall.share, default=None)
    if stall is None:
        return None
    takes = stalling_steps(stall, run, "takes", "take")
    unexplained = ", and nothing measured explains it"
    why = where_words(stall) or CAUSES[stall.cause] or unexplained
    return irregular_stalls.finding(
        share=stall.share,
        severity=stall_severity(stall),
        summary=f"{takes} {typical_wait(stall)} longer{why}.",
        evidence=cost_lines(stall, run),
        where=stall.where,
        remedies=(*offer_for_line(stall), *_offer_for_cause(stall.cause)),
    )


def _offer_for_cause(cause: StallCause) -> tuple[Remedy, ...]:
    on_stall = remedies.ON_STALL.offer()
    if cause == "operating_system":
        return (remedies.IDLE_MACHINE.offer(), on_stall)
    if cause == "logging":
        return (on_stall, remedies.NO_SYNC.offer())
    return (on_stall, remedies.IDLE_MACHINE.offer())


_AS_BEFORE = 0.05  # a last level this near to the best one is back to normal
_MOST_OF_RISE = 0.5  # of a rise
_GROWS = {  # the first that is most of a rise is named
    CORE_WAIT: "waiting for a core",
    "data": "waiting for data",
    "optimizer": "in the optimizer",
    "backward": "in backward",
    "forward": "in forward",
}
_TIMES = 1.5  # from here on a factor reads better than a percentage


class _Slower(NamedTuple):
    """One way in which steps slow down."""

    share: float  # of the mean step, over the whole run
    last: float  # of the last steps
    summary: str
    evidence: tuple[str, ...]


@rule("Slows down", part="run")
def slows_down(run: RankRun) -> Finding | None:
    """Steps take longer than they did before: from some step on, for a while, or ever more.
    Levels that rise, or a drift upwards, that cost 3% of the mean step or more. As a longer
    run would only go on, what the last steps lose says how severe it is."""
    ways = [way for way in (_by_levels(run), _by_drift(run.trend)) if way is not None]
    ways = sorted((way for way in ways if way.share >= LOW), key=lambda way: -way.share)
    if not ways:
        return None
    worst, *others = ways
    rises = [change for change in run.changes if change.factor > 1]
    crowded = any(_main_cause(change) == CORE_WAIT for change in rises)
    lines = _where(run)
    return slows_down.finding(
        share=worst.share,
        severity=severity_of(max(worst.share, worst.last)),
        summary=f"{sentence(worst.summary)}.",
        evidence=(*worst.evidence, *(other.summary for other in others)),
        where=_where(run),
        remedies=(
            (
                *((remedies.IDLE_MACHINE.offer(),) if crowded else ()),
                *(
                    (remedies.LOOK_AT_LINE.offer(_look_at(lines[0])),)
                    if lines and not crowded
                    else ()
                ),
                remedies.LATE_WINDOW.offer(),
                remedies.CHECK_HOST.offer(
                    "Look for a device that throttles, other processes, and lists or logs that grow"
                ),
            )
        ),
    )


def _where(run: RankRun) -> tuple[Place, ...]:
    """The lines of the largest rise."""
    rises = [change for change in run.changes if change.factor > 1]
    rise = max(rises, key=lambda change: change.after_ms - change.before_ms, default=None)
    return rise.where if rise is not None else ()


def _look_at(place: Place) -> str:
    return f"Look at {place.words}: since then it takes longer, or runs more often"


def _main_cause(change: LevelChange) -> str | None:
    """What most of a rise is, if any one thing is."""
    least = _MOST_OF_RISE * (change.after_ms - change.before_ms)
    return next((name for name in _GROWS if change.more_ms.get(name, 0.0) > least > 0), None)


def _of_it(change: LevelChange) -> str:
    """`, 15.0 ms of it waiting for data`."""
    cause = _main_cause(change)
    if cause is None:
        return ""
    more = min(change.more_ms[cause], change.after_ms - change.before_ms)
    return f", {milliseconds(more)} of it {_GROWS[cause]}"


def _by_levels(run: RankRun) -> _Slower | None:
    if not run.changes or run.times is None:
        return None
    levels = [run.changes[0].before_ms, *(change.after_ms for change in run.changes)]
    best = [min(levels[: place + 1]) for place in range(len(levels))]
    above = [level - least for level, least in zip(levels, best, strict=True)]
    # How many steps each level lasted; the first begins after the warm-up.
    first, end = run.warm_up, run.steps
    if run.series is not None and len(run.series.number):
        first = int(run.series.number[min(run.warm_up, len(run.series.number) - 1)])
        end = int(run.series.number[-1]) + 1
    edges = [first, *(change.step for change in run.changes), end]
    lengths = [max(1, after - before) for before, after in itertools.pairwise(edges)]
    cost = sum(ms * steps for ms, steps in zip(above, lengths, strict=True)) / sum(lengths)
    last = above[-1] / levels[-1]
    return _Slower(
        share=cost / run.times.mean_ms,
        last=last,
        summary=_describe_levels(run, best[-1], levels[-1]),
        evidence=(
            f"{milliseconds(cost)} of the {milliseconds(run.times.mean_ms)} mean step",
            *(_describe_change(change) for change in run.changes),
        ),
    )


def _describe_levels(run: RankRun, best: float, last: float) -> str:
    if last > best * (1 + _AS_BEFORE):
        rise = max(run.changes, key=lambda change: change.after_ms - change.before_ms)
        most = "mostly " if len(run.changes) > 1 else ""
        return (
            f"steps take {_longer(last / best)}, {most}from step {rise.step:,} on: "
            f"{milliseconds(last)} instead of {milliseconds(best)}{_of_it(rise)}"
        )
    rise = max(run.changes, key=lambda change: change.factor)
    later = next((change for change in run.changes if change.step > rise.step), None)
    until = f" to {later.step - 1:,}" if later else " and later"
    longer = f"{_longer(rise.factor)}{_of_it(rise)}"
    return f"steps {rise.step:,}{until} take {longer}; the others do not"


def _longer(times: float) -> str:
    return f"{factor(times)} times as long" if times >= _TIMES else f"{percent(times - 1)} longer"


def _describe_change(change: LevelChange) -> str:
    where = (
        f"step {change.step:,}"
        if change.low == change.high
        else f"step {change.step:,} (between {change.low:,} and {change.high:,})"
    )
    return (
        f"{where}: {milliseconds(change.before_ms)} before, {milliseconds(change.after_ms)} after"
        f"{_of_it(change)}"
    )


def _by_drift(trend: Trend | None) -> _Slower | None:
    if trend is None or trend.growth <= 0:
        return None
    memory = {
        True: ("steps are longer where more memory is allocated",),
        False: ("the time does not follow the allocated memory",),
        None: (),
    }[trend.follows_memory]
    return _Slower(
        share=trend.growth / 2 / (1 + trend.growth / 2),
        last=trend.growth / (1 + trend.growth),
        summary=f"steps get slower all the time: the last ones take {percent(trend.growth)} longer "
        "than the first",
        evidence=(f"{percent(trend.low)} to {percent(trend.high)} longer, over the run", *memory),
    )


_LEAST_START_SHARE = 0.05
_LEAST_START_MS = 10_000.0  # every Python process with torch takes some seconds
_START_WORDS = {
    "launch": "starting Python",
    "imports": "imports",
    "process_group": "joining the process group",
    "build": "building the model and the rest",
    "first_batch": "waiting for the first batch",
    "first_steps": "the first steps, with compiling and warm-up",
}


@rule("Long start-up", part="run")
def start_up(run: RankRun) -> Finding | None:
    """Much of the run passes before training is at its pace. Start-up and the first steps,
    of the wall time."""
    start, first = account_part(run, "start_up"), account_part(run, "first_steps")
    if run.account is None or start is None or first is None:
        return None
    ms, share = start.ms + first.ms, start.share + first.share
    if share < _LEAST_START_SHARE or ms < _LEAST_START_MS:
        return None
    parts = sorted((*(start.parts or (start,)), first), key=lambda part: -part.ms)
    trial = as_short_run(run, ms)
    cache, fast = remedies.KEEP_COMPILE_CACHE.offer(), remedies.FAST_START.offer()
    return start_up.finding(
        share=share,
        of="run",
        severity=length_severity(trial.share if trial else share, ms),
        summary=f"Training reaches its pace after {duration(1e6 * ms)}, {percent(share)} of the "
        f"{duration(1e6 * run.account.wall_ms)} run.",
        evidence=(
            ", ".join(
                f"{_START_WORDS.get(part.id, 'start-up')} {duration(1e6 * part.ms)}"
                for part in parts
                if part.ms >= 0.02 * ms
            ),
            *([trial.words] if trial else []),
        ),
        remedies=(cache, fast) if parts[0].id == "first_steps" else (fast, cache),
    )


class _Words(NamedTuple):
    title: str
    subject: str
    remedies: tuple[Change, ...]


_EVALUATION_WORDS: dict[StallCause, _Words] = {
    "evaluation": _Words("Evaluation", "Evaluation takes", (remedies.EVALUATE_LESS,)),
    "collecting": _Words(
        "Collecting experience", "Collecting experience takes", (remedies.MORE_ENVIRONMENTS,)
    ),
    "generating": _Words(
        "Generating samples", "Generating samples takes", (remedies.GENERATE_LESS,)
    ),
    "without_gradients": _Words(
        "Passes without gradients", "Passes without gradients take", (remedies.INFERENCE_MODE,)
    ),
}


@rule("Evaluation", part="run")
def evaluation_share(run: RankRun) -> Finding | None:
    """Evaluation, or other work beside the training, takes much of the run. Work beside the
    training inside steps and between epochs, as a share of the training loop."""
    kind, work = max(
        ((kind, beside_steps(run, kind)) for kind in WITHOUT_GRADIENTS),
        key=lambda each: each[1].share,
    )
    words = _EVALUATION_WORDS[kind]
    severity = wanted_work_severity(work.share)
    if severity is None:
        return None
    return evaluation_share.finding(
        share=work.share,
        of="run",
        severity=severity,
        title=words.title,
        summary=f"{words.subject} {percent(work.share)} of the training loop{work.how_often}.",
        evidence=work.evidence,
        where=work.where,
        remedies=tuple(remedy.offer() for remedy in words.remedies),
    )


@rule("Checkpoints", part="run")
def checkpoint_share(run: RankRun) -> Finding | None:
    """Saving checkpoints takes much of the run. Saving inside steps and between epochs, as a
    share of the training loop."""
    work = beside_steps(run, "checkpoint")
    severity = wanted_work_severity(work.share)
    if severity is None:
        return None
    return checkpoint_share.finding(
        share=work.share,
        of="run",
        severity=severity,
        summary=f"Saving checkpoints takes {percent(work.share)} of the training loop"
        f"{work.how_often}.",
        evidence=work.evidence,
        where=work.where,
        remedies=(
            remedies.ASYNC_CHECKPOINT.offer(),
            remedies.LESS_OFTEN.offer("Save less often, or to a faster disk"),
        ),
    )
