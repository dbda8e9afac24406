"""What a script did in the time without gradients: evaluation, or something that feeds training.

Capture sees that a model was put into evaluation mode, or that a loader was read without gradients.
Reinforcement learning does that to collect experience, and a generative model to draw samples. The
sampled stacks of those steps tell: by the functions that ran, by an environment's step, and by a
data loader that was read. Where they name none of it, it is "without gradients" and no more.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.whole_run.stall_stacks import is_library_frame
from stepscope.records.whole_run import STALL_CAUSES, WITHOUT_GRADIENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.place import Place
    from stepscope.records.stack_samples import StackSamples
    from stepscope.records.step_columns import StepColumns
    from stepscope.records.whole_run import AccountPart, RankRun, Stall, StallCause

FEWEST_SAMPLES = 4
_MOSTLY = 0.5  # of a step: its samples are those of the time without gradients
_LEAST_NAMED = 0.25  # of these samples: functions that say what it was
_LEAST_LOADING = 0.02  # of these samples: a loader was read
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
_LOADER = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]")


def name_time_without_gradients(run: RankRun, samples: StackSamples, steps: StepColumns) -> RankRun:
    """The run, with what it did instead of evaluating, where that is so."""
    spent = steps.phases_ns.get("evaluation")
    if spent is None or not spent.any():
        return run
    for inside in (spent >= _MOSTLY * steps.wall_ns, spent > 0):
        chosen = np.isin(samples.number, steps.number[inside])
        if int(chosen.sum()) >= FEWEST_SAMPLES:
            break
    else:
        return run
    without = np.isin(samples.number, steps.number[spent == 0])
    kind, places = _find_kind(
        samples.stacks,
        np.bincount(samples.stack[chosen], minlength=len(samples.stacks)).tolist(),
        np.bincount(samples.stack[without], minlength=len(samples.stacks)).tolist(),
    )
    return run if kind == "evaluation" else _renamed(run, kind, places)


def _find_kind(
    stacks: Sequence[tuple[Place, ...]], inside: Sequence[int], training: Sequence[int]
) -> tuple[StallCause, tuple[Place, ...]]:
    """And the lines that ran in the functions which tell it, the commonest first."""
    total = sum(inside)
    here, elsewhere = _function_counts(stacks, inside), _function_counts(stacks, training)
    common = {
        function
        for function, count in elsewhere.items()
        if 2 * count * total >= here[function] * sum(training)
    }
    kinds: Counter[StallCause] = Counter()
    lines: dict[StallCause, Counter[Place]] = {}
    loading = 0
    for stack, count in zip(stacks, inside, strict=True):
        if not count:
            continue
        loading += count * any(_LOADER.search(frame.file) for frame in stack)
        own = [frame for frame in stack if (frame.file, frame.function) not in common]
        if (found := kind_of_stack(own)) is not None:
            kind, place = found
            kinds[kind] += count
            lines.setdefault(kind, Counter())[place] += count
    for kind, count in kinds.most_common(1):
        if count >= _LEAST_NAMED * total:
            return kind, tuple(place for place, _ in lines[kind].most_common(3))
    if loading >= _LEAST_LOADING * total:
        return "evaluation", ()
    return "without_gradients", ()


def _function_counts(
    stacks: Sequence[tuple[Place, ...]], counts: Sequence[int]
) -> Counter[tuple[str, str]]:
    """Samples with each function; a function that calls itself counts once."""
    functions: Counter[tuple[str, str]] = Counter()
    for stack, count in zip(stacks, counts, strict=True):
        for function in {(frame.file, frame.function) for frame in stack}:
            functions[function] += count
    return functions


def kind_of_stack(frames: Sequence[Place]) -> tuple[StallCause, Place] | None:
    """By the outermost function whose name tells: an evaluation may play episodes, too."""
    for frame in frames:
        if _ENVIRONMENT.search(frame.file) or _is_environments_step(frame):
            return "collecting", frame
        if is_library_frame(frame):
            continue
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
    stalls = tuple(_rename_stall(stall, kind, places) for stall in run.stalls)
    account, series = run.account, run.series
    if account is not None:
        parts = tuple(_rename_part(part, kind) for part in account.parts)
        account = replace(account, parts=parts)
    if series is not None:
        cause = series.cause.copy()
        cause[cause == STALL_CAUSES.index("evaluation")] = STALL_CAUSES.index(kind)
        series = replace(series, cause=cause)
    assert kind in WITHOUT_GRADIENTS
    return replace(run, stalls=stalls, account=account, series=series)


def _rename_stall(stall: Stall, kind: StallCause, places: tuple[Place, ...]) -> Stall:
    if stall.cause != "evaluation":
        return stall
    return replace(stall, cause=kind, where=places or stall.where)


def _rename_part(part: AccountPart, kind: StallCause) -> AccountPart:
    return replace(part, id=kind) if part.id == "evaluation" else part
