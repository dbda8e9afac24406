"""What the script does outside the model's training, by sampled stacks: Python in typical
steps, evaluation and other time without gradients.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.explain.host_calls import is_library_frame
from stepscope.explain.whole_run.stall_stacks import TYPICAL, kinds_of_steps, line_of
from stepscope.records.normal import NORMAL_95
from stepscope.records.rank import StepColumns
from stepscope.records.run import (
    STALL_CAUSES,
    WITHOUT_GRADIENTS,
    OwnLine,
    OwnPython,
    RankRun,
    Stall,
    StallCause,
    StepSeries,
)
from stepscope.records.source_lines import Place, StackSamples

# What a script did in the time without gradients: evaluation, or something that feeds training.
#
# Capture sees that a model was put into evaluation mode, or that a loader was read without
# gradients. Reinforcement learning does that to collect experience, and a generative model to draw
# samples. The sampled stacks of those steps tell: by the functions that ran, by an environment's
# step, and by a data loader that was read. Where they name none of it, it is "without gradients"
# and no more.

FEWEST_SAMPLES_TO_NAME = 4
_MOSTLY = 0.5  # of a step: its samples are those of the time without gradients
_LEAST_NAMED = 0.25  # of these samples: functions that say what it was
# Of the samples of stalled steps: what only they do plays in an environment. Most of the time a
# policy's forward pass runs, whose functions are called anything.
_LEAST_IN_ENVIRONMENT, _FEWEST_IN_ENVIRONMENT = 0.03, 2
_MORE = 1.2  # times as much of such a step, against typical ones
_LEAST_LOADING = 0.05  # of these samples: a loader was read
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# Words in the names of functions, the surest first.
_EVALUATES = (
    "eval evaluate evaluation evaluating evaluator valid validate validation validating val test "
    "testing estimate accuracy metric metrics score infer inference"
)
_COLLECTS = (
    "collect collecting rollout rollouts act acting action actions explore play episode episodes "
    "experience trajectory trajectories interact"
)
_GENERATES = (
    "generate generating generation generator sample samples sampling sampler denoise ddim ddpm "
    "decode synthesize inpaint"
)
_NAMES: tuple[tuple[StallCause, frozenset[str]], ...] = (
    ("evaluation", frozenset(_EVALUATES.split())),
    ("collecting", frozenset(_COLLECTS.split())),
    ("generating", frozenset(_GENERATES.split())),
)
_ENVIRONMENT = re.compile(r"[/\\](gym|gymnasium|pettingzoo|envpool|dm_control|procgen)[/\\]")
_MODULE = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\]module\.py$")
_LOADER = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]")


def name_time_without_gradients(run: RankRun, samples: StackSamples, steps: StepColumns) -> RankRun:
    """The run, with what it did instead of evaluating, where that is so."""
    spent = steps.phases_ns.get("evaluation")
    if spent is None or not spent.any():
        return run
    for inside in (spent >= _MOSTLY * steps.wall_ns, spent > 0):
        chosen = np.isin(samples.number, steps.number[inside])
        if int(chosen.sum()) >= FEWEST_SAMPLES_TO_NAME:
            break
    else:
        return run
    without = np.isin(samples.number, steps.number[spent == 0])
    named = _find_kind(samples, chosen, without)
    kind, places = named or (_without_name(samples, chosen), ())
    return run if kind == "evaluation" else _renamed(run, kind, places)


def _without_name(samples: StackSamples, chosen: NDArray[np.bool_]) -> StallCause:
    """A model in evaluation mode that reads a data loader evaluates."""
    loads = [any(map(_gives_batch, stack)) for stack in samples.stacks]
    loading = np.array(loads, np.bool_)[samples.stack[chosen]]
    return "evaluation" if loading.mean() >= _LEAST_LOADING else "without_gradients"


def _gives_batch(frame: Place) -> bool:
    """Not where a loader only begins an epoch."""
    return frame.function.endswith("__next__") and bool(_LOADER.search(frame.file))


def name_unknown_stalls(run: RankRun, samples: StackSamples) -> RankRun:
    """The run, with a name for what some steps do with gradients that no backward pass uses: a
    policy acts in an environment, for example."""
    series = run.series
    if series is None or all(stall.cause != "unknown" for stall in run.stalls):
        return run
    unknown = STALL_CAUSES.index("unknown")
    kinds = kinds_of_steps(series)
    inside = np.isin(samples.number, series.number[kinds == unknown])
    typical = np.isin(samples.number, series.number[kinds == TYPICAL])
    if typical.sum() < FEWEST_SAMPLES_TO_NAME:
        return run
    named = _find_kind(samples, inside, typical, gradients=True)
    named = named or _find_acting(samples, inside, typical)
    if named is None:
        return run
    kind, places = named
    cause = series.cause.copy()
    cause[cause == unknown] = STALL_CAUSES.index(kind)
    stalls = tuple(_rename_stall(stall, "unknown", kind, places) for stall in run.stalls)
    return replace(run, stalls=stalls, series=replace(series, cause=cause))


def _find_acting(
    samples: StackSamples, chosen: NDArray[np.bool_], others: NDArray[np.bool_]
) -> tuple[StallCause, tuple[Place, ...]] | None:
    """In a script that has loaded an environment: steps that run the model's forward pass for a
    larger share of their time than typical ones. The policy acts, in environments so quick that no
    sample falls into them."""
    if not samples.environments:
        return None
    callers = [_caller_of_model(stack) for stack in samples.stacks]
    inside = Counter(callers[row] for row in samples.stack[chosen].tolist())
    training = Counter(callers[row] for row in samples.stack[others].tolist())
    share = 1 - inside.pop(None, 0) / max(1, int(chosen.sum()))
    usual = 1 - training.pop(None, 0) / max(1, int(others.sum()))
    if inside.total() < FEWEST_SAMPLES_TO_NAME or share < max(_LEAST_NAMED, _MORE * usual):
        return None
    new = {place: count for place, count in inside.items() if place not in training}
    return "collecting", tuple(sorted(new, key=lambda place: -inside[place]))[:3]


def _caller_of_model(stack: tuple[Place, ...]) -> Place | None:
    """The user's line that calls a module from outside; None where no module's forward runs."""
    for outer, frame in pairwise(stack):
        if _MODULE.search(frame.file):
            return outer
    return None


def _find_kind(
    samples: StackSamples,
    chosen: NDArray[np.bool_],
    others: NDArray[np.bool_],
    *,
    gradients: bool = False,
) -> tuple[StallCause, tuple[Place, ...]] | None:
    """What the chosen samples do that the others do less, and the lines of the functions which
    tell it, the commonest first. With gradients a step also trains, so less of it has to tell."""
    stacks = samples.stacks
    inside = np.bincount(samples.stack[chosen], minlength=len(stacks)).tolist()
    training = np.bincount(samples.stack[others], minlength=len(stacks)).tolist()
    total = sum(inside)
    here, elsewhere = _function_counts(stacks, inside), _function_counts(stacks, training)
    common = {
        function
        for function, count in elsewhere.items()
        if 2 * count * total >= here[function] * sum(training)
    }
    kinds: Counter[StallCause] = Counter()
    lines: dict[StallCause, Counter[Place]] = {}
    for stack, count in zip(stacks, inside, strict=True):
        if count and (named := kind_of_stack(stack, common)) is not None:
            kind, place = named
            kinds[kind] += count
            lines.setdefault(kind, Counter())[place] += count
    for kind, count in kinds.most_common(1):
        plays = kind == "collecting" and (gradients or bool(samples.environments))
        fewest = _FEWEST_IN_ENVIRONMENT if plays else FEWEST_SAMPLES_TO_NAME if gradients else 1
        if count >= max(fewest, (_LEAST_IN_ENVIRONMENT if plays else _LEAST_NAMED) * total):
            return kind, tuple(place for place, _ in lines[kind].most_common(3))
    return None


def _function_counts(
    stacks: Sequence[tuple[Place, ...]], counts: Sequence[int]
) -> Counter[tuple[str, str]]:
    """Samples with each function; a function that calls itself counts once."""
    functions: Counter[tuple[str, str]] = Counter()
    for stack, count in zip(stacks, counts, strict=True):
        for function in {(frame.file, frame.function) for frame in stack}:
            functions[function] += count
    return functions


def kind_of_stack(
    frames: Sequence[Place], common: Collection[tuple[str, str]] = ()
) -> tuple[StallCause, Place] | None:
    """By the outermost function whose name tells, without `common` ones: an evaluation may play
    episodes, too. The place is a line of the user's, where there is one."""
    caller: Place | None = None
    for frame in frames:
        if (frame.file, frame.function) in common:
            caller = caller if is_library_frame(frame) else frame
            continue
        if _ENVIRONMENT.search(frame.file):
            return "collecting", caller or frame
        if _is_environments_step(frame):
            return "collecting", frame
        if is_library_frame(frame):
            continue
        caller = frame
        words = {word.lower() for word in _WORD.findall(frame.function.rpartition(".")[2])}
        for kind, names in _NAMES:
            if words & names:
                return kind, frame
    return None


def _is_environments_step(frame: Place) -> bool:
    owner, _, name = frame.function.rpartition(".")
    words = {word.lower() for word in _WORD.findall(owner)}
    return name in ("step", "reset") and bool(words & {"env", "envs", "environment", "game"})


def _renamed(run: RankRun, kind: StallCause, places: tuple[Place, ...]) -> RankRun:
    stalls = tuple(_rename_stall(stall, "evaluation", kind, places) for stall in run.stalls)
    account, series = run.account, run.series
    if account is not None:
        parts = tuple(
            (replace(part, id=kind) if part.id == "evaluation" else part) for part in account.parts
        )
        account = replace(account, parts=parts)
    if series is not None:
        cause = series.cause.copy()
        cause[cause == STALL_CAUSES.index("evaluation")] = STALL_CAUSES.index(kind)
        series = replace(series, cause=cause)
    assert kind in WITHOUT_GRADIENTS
    return replace(run, stalls=stalls, account=account, series=series)


def _rename_stall(
    stall: Stall, old: StallCause, kind: StallCause, places: tuple[Place, ...]
) -> Stall:
    if stall.cause != old:
        return stall
    return replace(stall, cause=kind, where=places or stall.where)


# What typical steps do outside the model, by sampled stacks: environments, lists, numpy, logging.
#
# torch.compile, fused optimizers and larger layers do not reach this time, so the lines are named.
# Time in a data loader, in backward or in an optimizer, and time in a module's forward is not part
# of it. A tensor operator that the user's own line calls outside any module is: the stacks do not
# tell it from Python.

FEWEST_TYPICAL_SAMPLES = 40  # in typical steps: a share is then known to 15 points at worst
_LEAST_SHARE = 0.05  # of a step, for a line to be named
_MOST_LINES = 3
_TORCH = re.compile(r"[/\\]torch[/\\]")
# Whatever runs inside these belongs to a part of the step with findings of its own.
_PARTS = re.compile(
    r"[/\\]torch[/\\](?:utils[/\\]data|optim|autograd|nn[/\\]modules|_dynamo|_inductor)[/\\]"
)
_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")


def find_own_python(samples: StackSamples, series: StepSeries) -> OwnPython | None:
    """None with too few samples in typical steps."""
    chosen = np.isin(samples.number, series.number[kinds_of_steps(series) == TYPICAL])
    total = int(chosen.sum())
    if total < FEWEST_TYPICAL_SAMPLES:
        return None
    counts = np.bincount(samples.stack[chosen], minlength=len(samples.stacks))
    lines: Counter[tuple[Place, str]] = Counter()
    for stack, count in zip(samples.stacks, counts.tolist(), strict=True):
        # Whether no part of torch ran and no module's forward pass, and a line of the
        # user's did.
        if count and (
            bool(stack)
            and not _TORCH.search(stack[-1].file)
            and not any(_PARTS.search(frame.file) for frame in stack)
            and not all(map(is_library_frame, stack))
        ):
            lines[_line_and_package(stack)] += count
    share = lines.total() / total
    doubt = NORMAL_95 * math.sqrt((share * (1 - share) + 1 / total) / total)
    named = (
        OwnLine(place=place, share=count / total, package=package)
        for (place, package), count in lines.most_common(_MOST_LINES)
        if count >= _LEAST_SHARE * total
    )
    return OwnPython(
        share=share,
        low=max(0.0, share - doubt),
        high=min(1.0, share + doubt),
        samples=total,
        lines=tuple(named),
    )


def _line_and_package(stack: tuple[Place, ...]) -> tuple[Place, str]:
    """The innermost line of the user's; the library that it called, if one ran."""
    line = line_of(stack)
    if not is_library_frame(stack[-1]):
        return line, ""
    inner = stack[len(stack) - stack[::-1].index(line) :]
    packages = (match[1] for frame in inner if (match := _PACKAGE.search(frame.file)))
    return line, next(packages, "")
